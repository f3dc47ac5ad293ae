"""Compiles the simulator and the core it drives to machine code with mypyc: the same results, sooner.

    python libs/sim/compile.py build/compiled      some minutes; needs gcc and Python's headers
    PYTHONPATH=build/compiled evolving-sim run my.toml

The folder holds copies of both packages; what is not compiled there runs as it is. `make paper`, `make bench-split` and
`make bench-sim` see to all of it. The services run the same sources, not compiled.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
from mypyc.build import mypycify
from setuptools import Distribution, Extension
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("libs/common/src/evolving", "libs/sim/src/evolving_sim")
COMPILED = ("evolving/core", "evolving_sim", "evolving_sim/arms")
LEFT = {
    # Nothing in them takes long.
    *("evolving/core/fit.py", "evolving_sim/charts.py", "evolving_sim/cli.py", "evolving_sim/cli_output.py"),
    *("evolving_sim/sweeps.py", "evolving_sim/machines.py", "evolving_sim/mixes.py"),
    # What processes send to each other: frozen dataclasses can't be pickled once compiled.
    *("evolving_sim/outcomes.py", "evolving_sim/results.py"),
    # Fields of their dataclasses are of classes whose modules import them, which mypyc does not resolve.
    *("evolving_sim/relief.py", "evolving_sim/role_changes.py", "evolving_sim/arms/arm.py"),
}


def main(
    folder: Annotated[Path, typer.Argument(help="Emptied first.")],
    check: Annotated[
        bool, typer.Option("--check", help="Only whether mypyc takes the sources; leaves no folder.")
    ] = False,
) -> None:
    """Copy both packages, and compile what takes long beside the copies."""
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    os.chdir(folder)
    os.environ["MYPYPATH"] = str(folder)
    modules = [str(path) for part in COMPILED for path in sorted(Path(part).glob("*.py")) if path.name != "__init__.py"]
    modules = [module for module in modules if module not in LEFT]
    extensions = _translated(modules)
    if check:
        shutil.rmtree(folder)
        return
    print(f"compiling {len(modules)} modules: some minutes", flush=True)
    command = build_ext(Distribution({"name": "compiled", "ext_modules": extensions}))
    command.inplace = True
    command.ensure_finalized()
    command.run()
    shutil.rmtree("build")
    Path(".ready").touch()


def _translated(modules: list[str]) -> list[Extension]:
    """What mypyc says is shown only where it refuses: it warns of every generator that it makes a list of."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            return list(mypycify(["--ignore-missing-imports", *modules], opt_level="2", debug_level="0"))
        except SystemExit:
            print(said.getvalue(), file=sys.stderr)
            raise


if __name__ == "__main__":
    typer.run(main)
