"""The tables of docs/environment.md are what the code says.

`python tests/envs/test_power_shaping_docs.py` renews them.
"""

import inspect
import json
import re
from pathlib import Path
from types import UnionType

import pytest
from pydantic import BaseModel

from wattgym.config import FrozenModel
from wattgym.envs.config import OFFERS, ObservationConfig, PowerShapingConfig
from wattgym.envs.knobs import KNOBS
from wattgym.envs.observation import ObservationLayout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environment.md"


def observation_table():
    """Every feature once: histories and previews as `_k`, features of jobs as `job{j}.`."""
    config = ObservationConfig(preview_periods=1, error_history=1, command_history=1)
    layout = ObservationLayout(config, jobs=1, knobs=KNOBS, advice=True)
    rows = []
    for prefix, features in (("", layout.site_features), ("job{j}.", layout.job_features)):
        for f in features:
            name = re.sub(r"_1$", "_k", f.name)
            rows.append(f"| `{prefix}{name}` | {f.unit} | {f.description.replace('1 period(s)', 'k periods')} |")
    return ["| name | 1 means | meaning |", "|---|---|---|", *rows]


def attributes(model):
    """Descriptions of a model's keys, from its docstring and those of the models it extends."""
    above = model.__base__
    found, name = attributes(above) if above not in (FrozenModel, BaseModel) else {}, None
    section = inspect.getdoc(model).split("Attributes:\n", 1)[1]
    for line in section.splitlines():
        start = re.match(r"    (\w+): (.*)", line)
        if start:
            name = start[1]
            found[name] = start[2]
        elif name and line.startswith("        "):
            found[name] += " " + line.strip()
    return found


def config_rows(model, prefix=""):
    meanings = attributes(model)
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from config_rows(field.annotation, f"{prefix}{name}.")
            continue
        default = json.dumps(None if field.is_required() else field.get_default(call_default_factory=True))
        shown = "required" if field.is_required() else f"`{default}`"
        yield f"| `{prefix}{name}` | {shown} | {meanings[name]} |"
        for part in getattr(field.annotation, "__args__", ()):
            if isinstance(part, type) and issubclass(part, BaseModel):
                optional = isinstance(field.annotation, UnionType)
                yield from config_rows(part, f"{prefix}{name}." if optional else f"{prefix}{name}.FAMILY.")


def config_table():
    return ["| key | default | meaning |", "|---|---|---|", *config_rows(PowerShapingConfig)]


def offers_table():
    rows = [f"| `{name}` | {o.base:g} | {o.capacity:g} of the {o.of} |" for name, o in OFFERS.items()]
    return ["| family | base | capacity |", "|---|---|---|", *rows]


TABLES = {"observation": observation_table, "config": config_table, "offers": offers_table}


def renewed(text):
    for name, table in TABLES.items():
        body = "\n".join(table())
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text, found = re.subn(pattern, lambda m, body=body: f"{m[1]}{body}\n{m[2]}", text, flags=re.DOTALL)
        assert found == 1, f"{PAGE.name} needs one table '{name}'"
    return text


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_the_page_are_those_of_the_code(name):
    text = PAGE.read_text(encoding="utf-8")
    shown = re.search(rf"<!-- table: {name} -->\n(.*?)\n<!-- end -->", text, flags=re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == TABLES[name](), f"renew with: python {Path(__file__).name}"


def test_the_table_has_every_feature_of_a_layout():
    layout = ObservationLayout(ObservationConfig(preview_periods=3), jobs=2, knobs=KNOBS)
    table = "\n".join(observation_table())
    for feature in layout.features:
        name = re.sub(r"^job\d+", "job{j}", re.sub(r"_\d+$", "_k", feature.name))
        assert f"| `{name}` |" in table


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
