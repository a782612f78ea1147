"""What `serve`, `run` and `search-capacity` show in the terminal while they work.

    with make_view(dashboard=True) as view:
        install_logging(view, "info")
        view.update(snapshot)

A live region on a terminal, plain lines elsewhere; always on stderr, results are others' business.
"""

from __future__ import annotations

from dbench.console.logs import install_logging
from dbench.console.view import View, make_view
from dbench.progress import Progress

__all__ = ["Progress", "View", "install_logging", "make_view"]
