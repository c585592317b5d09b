#!/usr/bin/env python3
"""Builds the site of the documentation: python3 docs/build.py [OUT], target/site by default.

Stages the pages of docs/ and the recipes, as pages of code, in target/site-src, and builds them with MkDocs, whose packages are installed
into target/tools/site by pip (docs/requirements.txt). Warnings are errors: a link without a page, a page without a place in the menu. The
order of the book is that of the table in docs/guide/README.md. The site loads nothing from other hosts. Its search needs a server:
python3 -m http.server -d target/site.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TARGET = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
TOOLS, PAGES = TARGET / "tools" / "site", TARGET / "site-src"

# Sections of the menu behind the book: title, folder or pages.
MORE = [
    ("Under the hood", ["architecture.md", "glossary.md", "security.md", "benchmarks.md", "benchmarks/README.md", "adr/README.md"]),
]


def install():
    """Installs the pinned packages, unless they are there."""
    wanted = (ROOT / "docs" / "requirements.txt").read_text()
    stamp = TOOLS / "requirements.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(TOOLS, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--root-user-action", "ignore"]
    subprocess.run([*pip, "--no-deps", "--target", str(TOOLS), "-r", str(ROOT / "docs" / "requirements.txt")], check=True)
    stamp.write_text(wanted)


def stage():
    """Copies the pages, and makes a page of each recipe."""
    shutil.rmtree(PAGES, ignore_errors=True)
    for page in sorted((ROOT / "docs").rglob("*.md")):
        to = PAGES / page.relative_to(ROOT / "docs")
        to.parent.mkdir(parents=True, exist_ok=True)
        # Hundreds of records of decisions would bury the book in results of a search.
        head = "---\nsearch:\n  exclude: true\n---\n" if to.parent.name == "adr" else ""
        to.write_text(head + linked(page, page.read_text()))
    shutil.copy(ROOT / "docs" / "site.css", PAGES)
    rows = []
    (PAGES / "recipes").mkdir()
    for recipe in sorted((ROOT / "recipes").glob("*.lua")):
        code = recipe.read_text()
        what = re.match(r"-- recipes/\S+: (.*)", code)
        if what is None:
            sys.exit(f"{recipe}: the first line must be `-- recipes/NAME.lua: what it does`")
        name = recipe.stem
        (PAGES / "recipes" / f"{name}.md").write_text(f"# {name}.lua\n\n`recipes/{name}.lua` {what[1]}.\n\n```lua\n{code}```\n")
        rows.append(f"| [{name}]({name}.md) | {what[1]} |\n")
    text = "# Recipes\n\nWhole recipes and scripts of the folder `recipes/`. Each runs as it is: `perilune run recipes/digits.lua`.\n\n"
    (PAGES / "recipes" / "README.md").write_text(text + "| recipe | what it does |\n|---|---|\n" + "".join(rows))


def linked(page, text):
    """Turns links to recipes into links to their pages, and links to other files that the site lacks into their text."""

    def replace(match):
        label, target = match[1], match[2]
        if "://" in target or target.startswith("#"):
            return match[0]
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve()
        if file == ROOT / "recipes" or (file.parent == ROOT / "recipes" and file.suffix == ".lua"):
            name = "README" if file.suffix == "" else file.stem
            to = os.path.relpath(ROOT / "docs" / "recipes" / f"{name}.md", page.parent)
            return f"[{label}]({to})"
        if file.is_dir() and (file / "README.md").is_relative_to(ROOT / "docs") and (file / "README.md").exists():
            return f"[{label}]({path.rstrip('/')}/README.md)"
        inside = file.is_relative_to(ROOT / "docs") and file.suffix == ".md"
        return match[0] if inside else label

    out, fenced = [], False
    for line in text.splitlines(keepends=True):
        if line.startswith("```"):
            fenced = not fenced
            line = re.sub(r"^```lua \w+", "```lua", line)  # the word is a mark for the tests
        code = fenced or line.startswith("    ")
        out.append(line if code else re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", replace, line))
    return "".join(out)


def chapters(folder):
    """Lists the pages of a folder in the order of the table in its README."""
    table = (PAGES / folder / "README.md").read_text()
    return [f"{folder}/{name}" for name in re.findall(r"^\| \[[^\]]*\]\(([\w.-]+\.md)\)", table, re.M)]


def config(out):
    """Writes the configuration with the menu, and returns its path."""
    sections = [("Book", ["guide/README.md", *chapters("guide")]), ("Reference", ["reference/README.md", *chapters("reference")])]
    sections += [("Recipes", ["recipes/README.md", *chapters("recipes")]), *MORE]
    lines = [f"INHERIT: {ROOT / 'docs' / 'mkdocs.yml'}", f"docs_dir: {PAGES}", f"site_dir: {out}", "nav:", "  - Start: README.md"]
    for title, pages in sections:
        lines += [f"  - {title}:", *(f"      - {page}" for page in pages)]
    path = TARGET / "mkdocs.yml"
    path.write_text("\n".join(lines) + "\n")
    return path


def check_hosts(out):
    """Fails if a page would load a script, a style, a font or an image from another host."""
    foreign = re.compile(r"<(?:script|img|iframe)[^>]*src=\"?https?://|<link[^>]*rel=\"?(?:stylesheet|preconnect|preload)\"?[^>]*https?://")
    for page in out.rglob("*.html"):
        found = foreign.search(page.read_text())
        if found:
            sys.exit(f"{page}: {found[0]} loads from another host")


def main():
    out = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else TARGET / "site"
    install()
    stage()
    env = {**os.environ, "PYTHONPATH": str(TOOLS), "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    # With --quiet it would not count warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config(out))]
    built = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if built.returncode != 0:
        sys.exit(built.stdout)
    check_hosts(out)
    print(f"{out / 'index.html'}: {sum(1 for _ in out.rglob('*.html'))} pages")


if __name__ == "__main__":
    main()
