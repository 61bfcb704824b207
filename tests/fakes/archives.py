"""Archives that tests have made themselves."""

from __future__ import annotations

import tarfile
from pathlib import Path


def extract_all(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack an archive; Python before 3.10.12 and 3.11.4 knows no filters, and 3.12 warns without one."""
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    archive.extractall(folder)
