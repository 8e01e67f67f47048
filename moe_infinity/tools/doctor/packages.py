"""Python and packages, against the ranges that this package asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from moe_infinity.tools.doctor.line import Line, error, ok, warning

NEWEST_TESTED = "3.13"  # Python
LOADED = ("torch", "numba", "transformers")  # an installation may be broken: they are imported


def python_line(version: str, wanted: str, *, has_gil: bool) -> Line:
    found = Version(version)
    if found not in SpecifierSet(wanted):
        return error("python", f"{version}, needs {wanted}", f"install Python {wanted}")
    if not has_gil:
        hint = "use the ordinary build: the free-threaded one was never tried"
        return warning("python", f"{version}, free-threaded", hint)
    if found.release[:2] > Version(NEWEST_TESTED).release:
        hint = f"if packages are missing or fail, use Python {NEWEST_TESTED}"
        return warning("python", f"{version}, newer than what is tested", hint)
    return ok("python", version)


def package_lines(
    requirements: Sequence[str],
    version_of: Callable[[str], str | None],
    load: Callable[[str], object],
) -> Iterator[Line]:
    """`requirements` as in the package's metadata, without extras. `version_of` gives None for what
    is not installed, `load` raises if it cannot be imported.
    """
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            line = package_line(wanted, version_of(wanted.name))
            if line.state == "ok" and wanted.name in LOADED:
                line = loaded_line(line, load)
            yield line


def package_line(wanted: Requirement, version: str | None) -> Line:
    name = wanted.name
    hint = f"pip install '{name}{wanted.specifier}'"
    if version is None:
        return error(name, f"not installed, needs {wanted.specifier}", hint)
    try:
        fits = wanted.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return warning(name, f"{version}, which is no version", hint)
    if not fits:
        return error(name, f"{version}, needs {wanted.specifier}", hint)
    return ok(name, version)


def loaded_line(line: Line, load: Callable[[str], object]) -> Line:
    """The line of a package that is there, or that it cannot be imported."""
    try:
        load(line.check)
    except Exception as problem:  # whatever a broken installation gives
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        hint = (
            f"install it again: pip install --force-reinstall --no-deps {line.check}=={line.found}"
        )
        return error(line.check, f"{line.found} cannot be imported: {reason}", hint)
    return line


def triton_line(version: str | None, wanted: str, *, has_gpu: bool) -> Line:
    """Only a GPU needs it."""
    if not has_gpu:
        return ok("triton", f"{version or 'not installed'}, not needed without a GPU")
    hint = f"pip install 'triton{wanted}'"
    if version is None:
        return warning("triton", "not installed: torch computes experts one by one", hint)
    if Version(version) not in SpecifierSet(wanted):
        return error("triton", f"{version}, needs {wanted}", hint)
    return ok("triton", version)
