"""What a server says of itself: GetServerStatus for clients, ServeProgress for live views."""

from __future__ import annotations

from dataclasses import dataclass

from dbench import __version__
from dbench.progress import ServeProgress
from dbench.serve.deployment import Deployment
from dbench.serve.hub import Hub
from dbench.serve.sequence import Status
from dbench.serve.wire import ServerStatus, worker_progress


@dataclass(frozen=True, slots=True)
class ServerDescription:
    """What does not change while a server runs."""

    deployment: Deployment
    config_json: str
    environment_json: str
    metrics_output_dir: str
    started_s: float

    def status(self, hub: Hub) -> ServerStatus:
        deployment, model = self.deployment, self.deployment.model
        return ServerStatus(
            version=__version__,
            ready_for_requests=hub.is_ready,
            model=deployment.served_model_name,
            block_length=deployment.options.block_length,
            max_gen_len=deployment.max_gen_len,
            max_model_len=deployment.max_model_len,
            vocabulary_size=model.vocab_size,
            reserved_token_ids=tuple(sorted({*model.reserved_token_ids, deployment.mask_token_id})),
            mask_token_id=deployment.mask_token_id,
            eos_token_ids=model.eos_token_ids,
            workers=hub.worker_statuses(),
            resolved_config_json=self.config_json,
            environment_json=self.environment_json,
            now_s=hub.clock(),
            num_requests_in_server=hub.num_in_server,
            tokenizer=deployment.tokenizer,
            metrics_output_dir=self.metrics_output_dir,
            worker_counts=hub.worker_counts(),
        )

    def progress(self, hub: Hub, address: str) -> ServeProgress:
        return ServeProgress(
            address=address,
            model=self.deployment.served_model_name,
            state=hub.state,
            uptime_s=hub.clock() - self.started_s,
            num_in_server=hub.num_in_server,
            num_pending=hub.num_pending,
            num_completed=hub.num_ended(Status.COMPLETED),
            num_failed=hub.num_ended(Status.ERROR),
            num_cancelled=hub.num_ended(Status.CANCELLED),
            workers=tuple(worker_progress(worker) for worker in hub.worker_statuses()),
            recent_errors=tuple(hub.recent_errors),
        )
