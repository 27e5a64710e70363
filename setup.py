"""What pyproject.toml cannot say: a wheel has the pages of docs/findings, which `shardwright explain` prints."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PAGES = Path(__file__).parent / "docs" / "findings"


class BuildWithPages(build_py):
    """Copies the pages beside the catalogue of findings. An editable installation reads them where they are."""

    def run(self):
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "shardwright" / "core" / "findings" / "pages"
            target.mkdir(parents=True, exist_ok=True)
            for page in sorted(PAGES.glob("SW*.md")):
                self.copy_file(str(page), str(target / page.name))


setup(cmdclass={"build_py": BuildWithPages})
