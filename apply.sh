#!/usr/bin/env bash
# Put JAGG into a DanceGRPO checkout, look at it, take it out again, or run the demo. See usage() below.
set -euo pipefail
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_PREFIX # set when git itself started us; DIR decides, not they

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
patches=$here/patches/dancegrpo
default_dir=$here/upstream/DanceGRPO
module=fastvideo/jagg_patch # where the trainers import it from: torchrun puts their folder first on the path
hook='jagg_patch.install(globals()'

usage() {
  cat <<EOF
usage: ./apply.sh [ACTION] [--commit] [--only TRAINER] [DIR]

DIR is a DanceGRPO checkout or unpacked tarball; without it, upstream/DanceGRPO, cloned at the pinned commit if absent.

  (no action)       apply the patches and put the module beside the trainers; applying again updates both
  --check           say what applying would do to each trainer; change nothing
  --status          say what is applied, and whether the module is this version
  --reverse         take everything out again
  --demo [OUT]      train a tiny model with JAGG off and on, and compare; files go to OUT (default demo-output)
  --help            this text

  --commit          apply or reverse as git commits, so that git rebase carries them to a later upstream
  --only TRAINER    one trainer, e.g. train_grpo_flux, for checkouts that lack the others; may be repeated

exit status: 0 done, or already done; 1 refused, with the file and the reason, and nothing changed; 2 bad usage
EOF
}

die() { # status, lines
  local status=$1 line
  shift
  printf 'apply.sh: %s\n' "$1" >&2
  for line in "${@:2}"; do printf '  %s\n' "$line" >&2; done
  exit "$status"
}

bad_usage() { die 2 "$1" "./apply.sh --help shows the usage"; }

# git as if DIR were all there is: inside another repository, git apply would skip every file and still succeed.
git_apply() { GIT_CEILING_DIRECTORIES=$(dirname "$dir") git -C "$dir" -c core.autocrlf=false -c apply.whitespace=nowarn apply "$@"; }

pin() { git config --file "$here/upstream/pins.ini" --get-all "dancegrpo.$1"; }

target_of() { sed -n 's|^+++ b/||p' "$patches/$1.patch"; }

selected() { # trainers in series order, those of --only if given
  local name
  while read -r name; do
    name=${name%.patch}
    if [ ${#only[@]} -eq 0 ] || [[ " ${only[*]} " == *" $name "* ]]; then echo "$name"; fi
  done < <(grep -v '^#' "$patches/series")
}

# One of: applied, ready, or a reason why it can't be applied.
state_of() {
  local file
  file=$(target_of "$1")
  if [ ! -f "$dir/$file" ]; then
    echo "the file is missing; if this checkout never had it, name the trainers that it has with --only"
  elif git_apply --check --reverse "$patches/$1.patch" 2>/dev/null; then
    echo applied
  elif grep -qF "$hook" "$dir/$file"; then
    echo "the hook is there but was edited; restore the file (git checkout -- $file), then apply again"
  elif ! git_apply --check "$patches/$1.patch" 2>/dev/null; then
    echo "the line before which the hook goes ('args = parser.parse_args()') was changed; restore it or see 'Moving to a new upstream' in the README"
  elif [ ! -w "$dir/$file" ] || [ -z "$(find "$dir/$file" -prune -perm -200)" ]; then
    echo "the file is read-only; make it writable (chmod u+w)"
  else
    echo ready
  fi
}

module_version() { sed -n 's/^__version__ = "\(.*\)"/\1/p' "$1/__init__.py"; }

module_is_current() { diff -rq -x __pycache__ "$here/jagg_patch" "$dir/$module" >/dev/null 2>&1; }

any_hook() { # whether a trainer of the series, selected or not, is hooked
  local name
  while read -r name; do
    if grep -qsF "$hook" "$dir/$(target_of "${name%.patch}")"; then return 0; fi
  done < <(grep -v '^#' "$patches/series")
  return 1
}

exclude_file() { # of DIR's own repository; nothing if DIR isn't the top of one
  if [ -e "$dir/.git" ]; then git -C "$dir" rev-parse --path-format=absolute --git-path info/exclude; fi
}

put_module() {
  local new=$dir/$module.new.$$ exclude
  if ! module_is_current; then
    rm -rf "$new"
    cp -R "$here/jagg_patch" "$new"
    find "$new" -name __pycache__ -prune -exec rm -rf {} +
    rm -rf "${dir:?}/$module"
    mv "$new" "$dir/$module"
  fi
  exclude=$(exclude_file)
  if [ -n "$exclude" ] && ! grep -qsxF "/$module/" "$exclude"; then
    mkdir -p "$(dirname "$exclude")"
    echo "/$module/" >>"$exclude"
  fi
}

remove_module() {
  local exclude
  rm -rf "${dir:?}/$module"
  exclude=$(exclude_file)
  if [ -n "$exclude" ] && grep -qsxF "/$module/" "$exclude"; then
    grep -vxF "/$module/" "$exclude" >"$exclude.jagg" || true
    cat "$exclude.jagg" >"$exclude"
    rm "$exclude.jagg"
  fi
}

clone_pin() {
  local url commit partial=$here/upstream/.DanceGRPO.partial
  url=$(pin url) commit=$(pin commit)
  echo "cloning $url at ${commit:0:12} into upstream/DanceGRPO"
  rm -rf "$partial"
  if ! { git clone "$url" "$partial" && git -C "$partial" checkout --quiet --detach "$commit"; }; then
    rm -rf "$partial"
    die 1 "could not clone $url" "where there is network: git clone $url && git -C DanceGRPO checkout $commit" \
      "then copy the folder here and run ./apply.sh DIR"
  fi
  mv "$partial" "$default_dir"
}

require_upstream() {
  local file
  [ -d "$dir" ] || die 1 "$dir: no such directory"
  while read -r file; do
    if [ -f "$dir/$file" ]; then return; fi
  done < <(pin file)
  mapfile -t files < <(pin file)
  die 1 "$dir is not a DanceGRPO checkout: it has none of" "${files[@]}"
}

require_room_for_module() {
  local place
  for place in "$dir/fastvideo" "$(exclude_file)"; do
    if [ -e "$place" ] && { [ ! -w "$place" ] || [ -z "$(find "$place" -prune -perm -200)" ]; }; then
      die 1 "$place: it is read-only, and the module goes there" "make it writable (chmod u+w)"
    fi
  done
  if [ -L "$dir/$module" ] || { [ -e "$dir/$module" ] && [ ! -f "$dir/$module/install.py" ]; }; then
    die 1 "$dir/$module: something else is already there" "move it away, then apply again"
  fi
}

report() { # prints each trainer's state; returns 1 if one can't be applied
  local name state status=0
  for name in $(selected); do
    state=$(state_of "$name")
    case $state in
      applied) printf '  %-40s applied\n' "$(target_of "$name")" ;;
      ready) printf '  %-40s %s\n' "$(target_of "$name")" "${1:-ready to apply}" ;;
      *)
        printf '  %-40s refused: %s\n' "$(target_of "$name")" "$state"
        status=1
        ;;
    esac
  done
  return $status
}

names_in_state() {
  local name
  for name in $(selected); do
    if [ "$(state_of "$name")" = "$1" ]; then echo "$name"; fi
  done
}

patch_files() { sed "s|^|$patches/|; s|\$|.patch|"; }

verify_hooks() { # every named trainer has the hook: git apply's word isn't enough
  local name
  while read -r name; do
    grep -qF "$hook" "$dir/$(target_of "$name")" || return 1
  done
}

committed() { git -C "$dir" show "HEAD:./$(target_of "$1")" 2>/dev/null | grep -qF "$hook"; }

require_committable() {
  local file
  git -C "$dir" rev-parse --is-inside-work-tree >/dev/null 2>&1 || die 1 "$dir: --commit needs a git checkout" "apply without --commit"
  git -C "$dir" var GIT_COMMITTER_IDENT >/dev/null 2>&1 || die 1 "$dir: git doesn't know who commits" "set user.name and user.email"
  git -C "$dir" diff --cached --quiet || die 1 "$dir: the index has staged changes" "commit or unstage them, then apply again"
  for file in $(for name in $(selected); do target_of "$name"; done); do
    git -C "$dir" ls-files --error-unmatch "$file" >/dev/null 2>&1 || die 1 "$dir/$file: not tracked by git" "apply without --commit"
  done
}

do_apply() {
  local todo=() name file
  require_room_for_module
  report "applying" >/dev/null || { report >&2; die 1 "refused; nothing was changed in $dir"; }
  mapfile -t todo < <(names_in_state ready)
  if [ -n "$commit" ]; then
    require_committable
    for name in $(names_in_state applied); do
      if committed "$name"; then continue; fi
      todo+=("$name")
      git_apply --reverse "$patches/$name.patch"
    done
    for name in "${todo[@]}"; do
      file=$(target_of "$name")
      git -C "$dir" diff --quiet HEAD -- "$file" || die 1 "$dir/$file: has changes of yours" "commit or stash them, then apply again"
    done
    if [ ${#todo[@]} -gt 0 ]; then
      mapfile -t files < <(printf '%s\n' "${todo[@]}" | patch_files)
      if ! git -C "$dir" -c apply.whitespace=nowarn am --quiet --directory="$(git -C "$dir" rev-parse --show-prefix)" "${files[@]}" >&2; then
        git -C "$dir" am --abort >/dev/null 2>&1 || true
        die 1 "$dir: git am refused the patches (its reason stands above)" "apply without --commit"
      fi
    fi
  elif [ ${#todo[@]} -gt 0 ]; then
    # One call for all files: git apply writes nothing unless every hunk fits.
    printf '%s\n' "${todo[@]}" | patch_files | tr '\n' '\0' | xargs -0 cat | git_apply
  fi
  if ! selected | verify_hooks; then
    die 1 "$dir: the patch tool reported success but the hook is not there" "is this directory inside another git repository? Please report it"
  fi
  put_module
  echo "JAGG $(module_version "$here/jagg_patch") in $dir:"
  report
  echo "train as before; JAGG_ENABLED=0 turns it off, ./apply.sh --reverse takes it out"
}

do_reverse() {
  local applied=() name state
  for name in $(selected); do
    state=$(state_of "$name")
    if [[ $state == "the hook is there but was edited"* ]]; then die 1 "$dir/$(target_of "$name"): $state"; fi
  done
  mapfile -t applied < <(names_in_state applied)
  if [ ${#applied[@]} -gt 0 ]; then
    if [ -n "$commit" ]; then
      require_committable
    fi
    for name in "${applied[@]}"; do
      if [ ! -w "$dir/$(target_of "$name")" ]; then die 1 "$dir/$(target_of "$name"): the file is read-only" "make it writable (chmod u+w)"; fi
    done
    printf '%s\n' "${applied[@]}" | patch_files | tr '\n' '\0' | xargs -0 cat | git_apply --reverse
  fi
  any_hook || remove_module
  if [ -n "$commit" ] && [ ${#applied[@]} -gt 0 ]; then
    mapfile -t files < <(for name in "${applied[@]}"; do target_of "$name"; done)
    git -C "$dir" commit --quiet --only -m "Take JAGG's hook out" -- "${files[@]}"
  fi
  echo "${#applied[@]} trainers taken back in $dir"
  for name in "${applied[@]}"; do
    if [ -z "$commit" ] && [ -e "$dir/.git" ] && committed "$name"; then
      echo "  the hook was committed: commit this change too (git commit $(target_of "$name"))"
    fi
  done
}

do_status() {
  report "not applied" || true
  if [ ! -d "$dir/$module" ]; then
    echo "  $module: absent"
  elif module_is_current; then
    echo "  $module: version $(module_version "$dir/$module")"
  else
    echo "  $module: version $(module_version "$dir/$module"), stale (this is $(module_version "$here/jagg_patch")): run ./apply.sh again"
  fi
}

action=apply commit='' only=() rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --check | --status | --reverse | --demo)
      [ "$action" = apply ] || bad_usage "$1 and --$action exclude each other"
      action=${1#--}
      ;;
    --commit) commit=yes ;;
    --only)
      [ $# -gt 1 ] || bad_usage "--only needs a trainer"
      [ -f "$patches/$2.patch" ] || bad_usage "--only $2: there is no patch of that name; there are $(selected | tr '\n' ' ')"
      only+=("$2")
      shift
      ;;
    --help | -h)
      usage
      exit 0
      ;;
    -*) bad_usage "unknown option $1" ;;
    *) rest+=("$1") ;;
  esac
  shift
done
[ ${#rest[@]} -le 1 ] || bad_usage "one directory at most, got ${#rest[@]}"
if [ -n "$commit" ] && [ "$action" != apply ] && [ "$action" != reverse ]; then bad_usage "--commit goes with applying and --reverse"; fi
command -v git >/dev/null || die 1 "git is not installed"

if [ "$action" = demo ]; then
  python=$("$here/tests/venv.sh" demo)
  exec "$python" "$here/upstream/demo.py" --out "${rest[0]:-$here/demo-output}"
fi

dir=${rest[0]:-$default_dir}
if [ "$action" = apply ] && [ ${#rest[@]} -eq 0 ] && [ ! -d "$dir" ]; then clone_pin; fi
require_upstream
dir=$(cd "$dir" && pwd -P)

case $action in
  check) report || die 1 "a trainer can't be patched" ;;
  *) "do_$action" ;;
esac
