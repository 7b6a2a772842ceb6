"""The pages: their links lead somewhere, they are short, and the README's tables are those of the code and the other pages."""

import re
import subprocess
from pathlib import Path

import pytest

from jagg_patch import JaggConfig

ROOT = Path(__file__).parents[2]
README = "README.md"
MOST_LINES, MOST_WORDS, WIDTH, PARAGRAPH = 200, 1600, 120, 6
NOT_OURS = (".git/", ".venv", "demo-output/", "upstream/DanceGRPO/", "upstream/flow_grpo/")  # in an unpacked archive
OF_UPSTREAM = {"base.py", "finetune_flux_grpo_8gpus.sh", "train_new.py", "train_grpo_new.py"}  # files that pages name


def files():
    """Every file of the repository, as git lists them, or, in an unpacked archive, the folders."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        return [name for name in listed.stdout.split("\n") if (ROOT / name).is_file()]
    names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]
    return [name for name in names if not name.startswith(NOT_OURS)]


FILES = files()
PAGES = [name for name in FILES if name.endswith(".md")]


def text_lines(page):
    """`(number, line)` of the page without what stands between fences: code and formulas."""
    fence = None
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        mark = re.match(r" *(```+|~~~+)", line)
        if mark and fence is None:
            fence = mark[1]
        elif mark and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = None
        elif fence is None:
            yield number, line


def anchors(page):
    """GitHub's: lower case, spaces as hyphens, no other marks; a second one of the same name gets -1."""
    found = {}
    for _, line in text_lines(page):
        heading = re.match(r" {0,3}#{1,6} +(.*?)(?: +#+)? *$", line)
        if heading:
            shown = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", heading[1])  # a link's text
            slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
            number = found.get(slug, 0)
            found[slug] = number + 1
            yield f"{slug}-{number}" if number else slug


CODE = r"(`+)(?!`)(.*?)(?<!`)\1(?!`)"  # within a line


def prose_lines(page):
    """`text_lines` without code in the lines."""
    for number, line in text_lines(page):
        yield number, re.sub(CODE, "code", line)


def links(page):
    """`(line number, target)`, of inline links, pictures and reference definitions."""
    for number, line in prose_lines(page):
        for target in re.findall(r"\]\(<?([^)\s>]+)", line) + re.findall(r"^ {0,3}\[[^]]+\]: *<?([^\s>]+)", line):
            yield number, target


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    broken = []
    for number, target in links(page):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = target.partition("#")
        found = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not found.is_relative_to(ROOT) or not found.exists():
            broken.append(f"{page}:{number}: {target}: there is no such file")
        elif anchor and (found.suffix != ".md" or anchor not in anchors(found.relative_to(ROOT))):
            broken.append(f"{page}:{number}: {target}: there is no such heading")
    assert not broken, "\n".join(broken)


def test_every_reference_is_defined():
    for page in PAGES:
        text = "\n".join(line for _, line in prose_lines(page))
        defined = set(re.findall(r"^\[([^]]+)\]: ", text, re.MULTILINE))
        assert set(re.findall(r"\]\[([^]]+)\]", text)) == defined, page


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_named_exists(page):
    """By its whole path, or the end of it."""
    named = {code for _, line in text_lines(page) for _, code in re.findall(CODE, line)}
    words = {word for code in named for word in code.split() if re.fullmatch(r"[\w./-]+\.(?:py|sh|ini|cfg|json)", word)}
    there = [f"/{name}" for name in FILES]
    missing = {word for word in words if not any(name.endswith(f"/{word.removeprefix('./')}") for name in there)}
    missing = {word for word in missing if not word.startswith(("OUT", "$")) and Path(word).name not in OF_UPSTREAM}
    assert not missing, f"{page}: {', '.join(sorted(missing))}"


def test_the_readme_has_at_most_1600_words():
    assert len((ROOT / README).read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_at_most_200_lines(page):
    assert len((ROOT / page).read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", PAGES)
def test_no_line_is_wider_than_120_characters(page):
    """But for where links lead, and not even for that in the README."""
    wide = []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        counted = line if page == README else re.sub(r"(?<=\]\()[^)\s]+(?=\))|https?://\S+", "", line)
        if len(counted) > WIDTH:
            wide.append(f"{page}:{number}: {len(counted)} characters")
    assert not wide, "\n".join(wide)


@pytest.mark.parametrize("page", PAGES)
def test_no_paragraph_is_longer_than_six_lines(page):
    """A point of a list is a paragraph of its own; tables, headings and code are none."""
    length, last, long = 0, 0, []
    for number, line in text_lines(page):
        if not line.strip() or line.lstrip().startswith(("|", "#")):
            length = 0
        else:
            starts = number != last + 1 or re.match(r" *(?:[-*+]|\d+[.)]) ", line)
            length = 1 if starts else length + 1
            if length == PARAGRAPH + 1:
                long.append(f"{page}:{number}")
        last = number
    assert not long, "\n".join(long)


def rows(page, first):
    """The cells of the tables' rows in which the first cell matches `first`."""
    for _, line in text_lines(page):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and re.match(first, cells[0]):
            yield cells


def test_the_readme_s_table_of_settings_is_the_configuration_s():
    shown = {name: default for name, default, *_ in rows(README, "`JAGG_")}
    defaults = {f"`JAGG_{name.upper()}`": value for name, value in JaggConfig().as_dict().items()}
    for name, value in defaults.items():
        default = str(int(value)) if isinstance(value, bool) else str(value)
        assert shown.pop(name) == ("none" if value in ("", ()) else f"`{default}`"), name
    assert not shown


def test_the_readme_s_table_of_trainers_is_that_of_their_page():
    """Whose numbers test_cost.py computes."""
    name = r"`(train_\w+)`"
    shown = {}
    for trainers, update, whole in rows(README, rf"(?:[\w-]+: )?{name}"):
        shown |= {trainer: (update, whole) for trainer in re.findall(name, trainers)}
    page = [cells for cells in rows("jagg_patch/trainers/README.md", name) if "→" in cells[2]]
    assert shown == {cells[0].strip("`"): tuple(cell.split(", ")[1] for cell in cells[2:4]) for cells in page}


def test_the_readme_s_hook_is_the_patch_s():
    diff = re.search(r"```diff\n(.*?)```", (ROOT / README).read_text(), re.DOTALL)[1]
    assert diff in (ROOT / "patches/dancegrpo/train_grpo_flux.patch").read_text()


def test_the_readme_says_where_the_paper_is():
    assert "https://arxiv.org/abs/2607.17572" in (ROOT / README).read_text()
