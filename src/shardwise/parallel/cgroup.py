"""The cgroups of this process, whose limits a container has: version 2, version 1, or both."""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cgroup_folders(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[Path]:
    """Return the folders that may limit `controller` (memory, cpu): the cgroup of this process and
    all above it, since each of them limits what is below. A container often sees only `root`.

    `membership` has a line `number:controllers:path` for each hierarchy (cgroups(7)).
    """
    folders = [root, root / controller]
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        parts = path.strip("/").split("/")
        folders += [top.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
    return list(dict.fromkeys(folders))
