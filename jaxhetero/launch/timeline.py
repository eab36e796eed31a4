"""The trace of a job: each worker writes its rounds to a file of its own, and the launcher joins them at the end."""

from __future__ import annotations

from pathlib import Path

from jaxhetero.errors import ConfigError
from jaxhetero.launch.terminal import Display
from jaxhetero.watching.rounds_file import join_files
from jaxhetero.watching.trace import check_target, replacing


class JobTimeline:
    """The trace that ``--timeline`` asks for; nothing without a target.

    Raises:
      ConfigError: the target cannot be written.
    """

    def __init__(self, target: Path | None) -> None:
        self._target = target
        self._files: dict[str, Path] = {}
        if target is not None:
            check_target(target)

    def start(self, worker_count: int, log_dir: Path, restart_count: int) -> dict[str, str]:
        """Where each worker of a start writes its rounds, by its name; "" for nowhere."""
        workers = [f"worker {rank}" for rank in range(worker_count)]
        if self._target is None:
            return dict.fromkeys(workers, "")
        # The program may change its folder before it joins the job.
        files = {name: log_dir.absolute() / f"{name.replace(' ', '-')}.rounds" for name in workers}
        suffix = f", restart {restart_count}" if restart_count else ""
        self._files |= {name + suffix: path for name, path in files.items()}
        return {name: str(path) for name, path in files.items()}

    def write(self, display: Display) -> None:
        """Join what the workers have written, and remove their files."""
        if self._target is None:
            return
        try:
            with replacing(self._target) as part:
                join_files(part, self._files)
        except ConfigError as error:
            display.message(
                f"{error}; the rounds of each worker are still in {', '.join(map(str, self._files.values()))}"
            )
            return
        for path in self._files.values():
            path.unlink(missing_ok=True)
        display.message(f"timeline in {self._target}: open it at https://ui.perfetto.dev")
