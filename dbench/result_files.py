"""How results reach the disk: whole or not at all, CSV values to four decimals, the schema version in every file.

A CSV carries the version in its last column, a JSON object in its first key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbench.errors import RunError, one_line
from dbench.events import SCHEMA_VERSION
from dbench.json_values import strict

if TYPE_CHECKING:
    import pandas as pd

DECIMALS = 4
SCHEMA_COLUMN = "schema_version"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; takes its place when the block ends, and is removed if it raises.

    Raises RunError when the system does not let it be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise RunError(f"{path}: cannot be written ({reason}); look at its folder's rights and free space") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """NaN becomes null, infinities the texts "inf" and "-inf"; a record in a list stands on one line."""
    stamped = strict({SCHEMA_COLUMN: SCHEMA_VERSION, **record})
    lines = ",\n".join(f" {json.dumps(name)}: {_indented(value)}" for name, value in stamped.items())
    write_text(path, f"{{\n{lines}\n}}\n")


def write_csv(path: Path, table: pd.DataFrame, exact: Sequence[str] = ()) -> None:
    """The table without its index; a missing value is an empty cell, an infinite one `inf`.

    The columns in `exact` keep twelve significant digits: a rate of 0.00123 needs more than four decimals.
    """
    import pandas as pd

    with replacing(path) as temporary:
        stamped = rounded(table, exact).assign(**{SCHEMA_COLUMN: SCHEMA_VERSION})
        for name in table.select_dtypes("float").columns:  # pandas' own float_format takes three times as long
            cells = zip(stamped[name].tolist(), stamped[name].isna().tolist(), strict=True)
            form = ".12g" if name in exact else f".{DECIMALS}f"
            stamped[name] = pd.Series(["" if missing else format(v, form) for v, missing in cells], table.index, object)
        stamped.to_csv(temporary, index=False, lineterminator="\n")


def _indented(value: Any) -> str:
    """JSON over several lines, but a list of flat records with one on each: a report has one per request."""
    if isinstance(value, list) and value and all(map(_is_flat, value)):
        return "[\n" + ",\n".join(f"  {json.dumps(item, allow_nan=False)}" for item in value) + "\n ]"
    return json.dumps(value, indent=1, allow_nan=False).replace("\n", "\n ")


def _is_flat(value: Any) -> bool:
    return isinstance(value, dict) and not any(isinstance(item, dict | list) for item in value.values())


def rounded(table: pd.DataFrame, exact: Sequence[str] = ()) -> pd.DataFrame:
    """The values that a CSV holds: to four decimals, and no negative zero."""
    result = table.copy()
    for name in table.select_dtypes("float").columns.difference(list(exact)):
        result[name] = table[name].round(DECIMALS) + 0.0
    return result
