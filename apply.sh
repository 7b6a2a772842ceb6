#!/usr/bin/env bash
# Put JAGG into a DanceGRPO or Flow-GRPO checkout, look at it, take it out again, or run the demo. See usage() below.
set -euo pipefail
# DIR decides, not what a git hook or the shell left in the environment.
mapfile -t left_by_git < <(git rev-parse --local-env-vars 2>/dev/null)
unset CDPATH "${left_by_git[@]}"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
hook='jagg_patch.install(globals()'
declare -A state=() # of a trainer, as state_of says it
declare -A verdict=() differs=() # of a trainer, what examine finds

usage() {
  cat <<EOF
usage: ./apply.sh [ACTION] [--commit] [--only TRAINER] [DIR]

DIR is a DanceGRPO or Flow-GRPO checkout or unpacked tarball; its files tell which. Without DIR: of upstream/DanceGRPO and
upstream/flow_grpo those that are there, or with --only those of the named trainers. Applying clones at the pinned commit what
is named in either way but absent, and upstream/DanceGRPO if nothing is named and neither is there.

  (no action)       apply the patches and put the module beside the trainers; applying again updates both
  --check           say what applying would do to each trainer; change nothing
  --status          say what is applied, and whether the module is this version
  --refresh         make patches, lock and pin anew from what DIR has committed, and show what changes (patches/README.md)
  --export          make the patches anew from the hooks as you have edited them in DIR
  --reverse         take everything out again
  --demo [OUT]      train a tiny model with JAGG off and on, and compare; files go to OUT (default demo-output)
  --help            this text

  --commit          apply or reverse as git commits, so that git rebase carries them to a later upstream
  --only TRAINER    one trainer, e.g. train_grpo_flux; may be repeated. Without it, all that the checkout has

exit status: 0 done, or already done; 1 refused, with the file and the reason, and nothing changed; 2 bad usage
EOF
}

die() { # status, lines
  local status=$1 line
  printf 'apply.sh: %s\n' "$2" >&2
  for line in "${@:3}"; do printf '  %s\n' "$line" >&2; done
  exit "$status"
}

bad_usage() { die 2 "$1" "./apply.sh --help shows the usage"; }

# -- the upstreams and their patches

upstreams=(dancegrpo flow_grpo)

pin() { git config --file "$here/upstream/pins.ini" --get-all "upstream.$upstream.$1"; }

use() { # an upstream: what follows is about it
  upstream=$1
  patches=$here/patches/$upstream
  module=$(pin module)
}

trainers_of() { sed -n '/^#/d; s/\.patch$//p' "${@/%//series}"; } # folders with patches

all_trainers() { trainers_of "$patches"; }

every_trainer() { trainers_of "$here"/patches/*/; } # of every upstream

named() { all_trainers | grep -xF "$(printf '%s\n' "${only[@]}")"; } # by --only, in series order

selected() { # the named ones if there is --only, else those that the checkout has
  local name
  if [ ${#only[@]} -gt 0 ]; then
    named
  else
    for name in $(all_trainers); do
      if has_file "$name"; then echo "$name"; fi
    done
  fi
}

target_of() { echo "${module%/*}/$1.py"; }

context_of() { sed -n '/^@@/,$s/^ //p' "$patches/$1.patch"; } # the line before which the hook goes

# A command of the module, with any Python: not through the package, which imports torch.
in_python() { # module, arguments
  "$python" -I -B -c 'import importlib, signal, sys, types
signal.signal(signal.SIGINT, signal.SIG_DFL)  # as any other command ends
package = types.ModuleType("jagg_patch")
package.__path__ = [sys.argv[1]]
sys.modules["jagg_patch"] = package
importlib.import_module("jagg_patch.commands." + sys.argv[2]).main(*sys.argv[3:])' "$here/jagg_patch" "$@"
}

find_python() {
  for python in ${PYTHON:+"$PYTHON"} python3 python python3.{13,12,11,10}; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then return; fi
  done
  return 1
}

has_file() { [ -e "$dir/$(target_of "$1")" ] || [ -L "$dir/$(target_of "$1")" ]; }

in_dir() { git -C "$dir" -c core.autocrlf=false -c apply.whitespace=nowarn "$@"; }

# Patches of the named trainers, as one input: git apply writes nothing unless every hunk of it fits. Without
# --directory it would skip every file of a DIR inside another repository, and still exit 0.
git_apply() { # options, --, trainers
  local options=()
  while [ "$1" != -- ]; do
    options+=("$1")
    shift
  done
  shift
  (cd "$patches" && cat "${@/%/.patch}") | in_dir apply --directory="$prefix" "${options[@]}"
}

has_hook() { grep -qsF "$hook" "$dir/$(target_of "$1")"; }

# Where the lines that a trainer's patch adds stand in its file, as sed wants it: however indented, with empty lines between (a
# formatter's), and before whatever line of the same indentation. Nothing unless they stand there whole, and once.
hook_lines() {
  sed -n '/^@@/,/^-- $/s/^+//p' "$patches/$1.patch" | awk -v hook="$hook" '
    { line = $0; sub(/\r$/, "", line); sub(/^[ \t]+/, "", line) }
    NR == FNR { if (line != "") hook_line[++n] = line; next }
    index($0, hook) { n_hooks++ }
    line == "" || (complete && line ~ /^#/) { next }
    { margin = $0; sub(/[^ \t].*/, "", margin) }
    complete { complete = 0; if (margin == margin_of_first) { found = first "," last; n_found++ } }
    line != hook_line[k + 1] { k = 0 }
    line == hook_line[k + 1] {
      if (++k == 1) { first = FNR; margin_of_first = margin }
      if (k == n) { last = FNR; complete = 1; k = 0 }
    }
    END { if (n_found == 1 && n_hooks == 1) print found }' - "$dir/$(target_of "$1")"
}

take_out() { # of trainers that are `applied`
  local name
  for name in "$@"; do sed -i "$(hook_lines "$name")d" "$dir/$(target_of "$name")"; done
}

any_hook() { # of any trainer, selected or not
  local name
  for name in $(all_trainers); do
    if has_hook "$name"; then return; fi
  done
  return 1
}

is_read_only() { [ ! -w "$1" ] || [ -z "$(find "$1" -prune -perm -200)" ]; } # root can write anywhere: look at the mode too

# One of: applied, ready, or the reason why it can't be applied.
state_of() {
  local file
  file=$(target_of "$1")
  if [ ! -f "$dir/$file" ]; then
    echo "the file is missing"
  elif [ -L "$dir/$file" ] || [ -L "$dir/${module%/*}" ]; then
    echo "a symbolic link, which git does not patch; put the file itself there, or name the folder that it is in"
  elif grep -qE '^(<<<<<<<|>>>>>>>) ' "$dir/$file"; then
    echo "git has left a conflict in it; resolve that first (git status)"
  elif has_hook "$1"; then
    if [ -n "$(hook_lines "$1")" ]; then echo applied; else
      echo "the hook is there but was edited, or is another version's: take its lines out by hand, or with the version that put them there (to keep an edit: patches/README.md, 3)"
    fi
  elif git_apply --check -- "$1" 2>/dev/null; then
    if is_read_only "$dir/$file"; then echo "the file is read-only; make it writable (chmod u+w)"; else echo ready; fi
  elif grep -qxF "$(context_of "$1")"$'\r' "$dir/$file"; then
    echo "its lines end in CRLF; convert it (dos2unix), then apply again"
  elif [ -n "$(tail -c 1 "$dir/$file")" ] && [ "$(tail -n 1 "$dir/$file")" = "$(context_of "$1")" ]; then
    echo "its last line lacks the newline; add it"
  else
    echo "the line before which the hook goes ('$(context_of "$1" | xargs)') was changed; where the contract holds, ./apply.sh --refresh finds its place (patches/README.md)"
  fi
}

look() { # into trainers, and for each into state
  local name
  mapfile -t trainers < <(selected)
  state=()
  for name in "${trainers[@]}"; do state[$name]=$(state_of "$name"); done
}

examine() { # the contracts of the trainers that are there: into verdict, and into differs a line for each thing to say
  local name text said files=()
  verdict=() differs=()
  for name in "${trainers[@]}"; do
    if [ -f "$dir/$(target_of "$name")" ]; then files+=("$(target_of "$name")"); fi
  done
  if [ ${#files[@]} -eq 0 ]; then return; fi
  if ! find_python; then
    echo "apply.sh: there is no Python from 3.10 on to check the contracts with; they are checked when training starts" >&2
    return
  fi
  said=$(in_python doctor "$dir" "$upstream" "${files[@]}") || die 1 "$dir: its contracts can't be checked (the reason stands above)"
  while IFS=$'\t' read -r name is text; do
    case $is in holds | broken | unknown) ;; *) continue ;; esac # what else a Python may print
    verdict[$name]=$is
    differs[$name]+=${differs[$name]:+$'\n'}$text
  done <<<"$said"
}

in_state() {
  local name
  for name in "${trainers[@]}"; do
    if [ "${state[$name]}" = "$1" ]; then echo "$name"; fi
  done
}

report() { # a line a trainer, with $1 for those that aren't patched yet; returns 1 if one can't be
  local name said status=0
  for name in "${trainers[@]}"; do
    said=${state[$name]}
    case $said in
      applied) ;;
      ready) said=$1 ;;
      *) said="refused: $said" status=1 ;;
    esac
    printf '  %-40s %s\n' "$(target_of "$name")" "$said"
  done
  list_absent
  return $status
}

list_absent() {
  local name
  for name in $(all_trainers); do
    if [ ${#only[@]} -eq 0 ] && ! has_file "$name"; then
      printf '  %-40s %s\n' "$(target_of "$name")" "not in this checkout"
    fi
  done
}

# -- the module beside the trainers

module_version() { sed -n 's/^__version__ = "\(.*\)"/\1/p' "$1/__init__.py"; }

module_is_current() { diff -rq -x __pycache__ "$here/jagg_patch" "$dir/$module" >/dev/null 2>&1; }

module_state() {
  if is_other_module; then
    echo "something else"
  elif ! module_is_ours; then
    echo "absent; ./apply.sh puts it there"
  elif module_is_current; then
    echo "version $(module_version "$dir/$module")"
  else
    echo "version $(module_version "$dir/$module"), stale: differs from this $(module_version "$here/jagg_patch"); ./apply.sh updates it"
  fi
}

module_is_ours() { [ ! -L "$dir/$module" ] && [ -f "$dir/$module/install.py" ]; }

is_other_module() { { [ -e "$dir/$module" ] || [ -L "$dir/$module" ]; } && ! module_is_ours; }

git_path() { # in DIR's own .git, absolute (--path-format needs git 2.31)
  local path
  path=$(git -C "$dir" rev-parse --git-path "$1")
  case $path in /*) echo "$path" ;; *) echo "$dir/$path" ;; esac
}

exclude_file() { # of the repository that DIR is the top of; nothing if it isn't
  if [ -e "$dir/.git" ]; then git_path info/exclude; fi
}

put_module() {
  if ! module_is_current; then
    cp -R "$here/jagg_patch" "$dir/$module.new"
    find "$dir/$module.new" -name __pycache__ -prune -exec rm -rf {} +
    if module_is_ours; then mv "$dir/$module" "$dir/$module.old"; fi
    mv "$dir/$module.new" "$dir/$module"
  fi
  if [ -n "$exclude" ] && ! grep -qsxF "/$module/" "$exclude"; then
    mkdir -p "$(dirname "$exclude")"
    if [ -s "$exclude" ] && [ -n "$(tail -c 1 "$exclude")" ]; then echo >>"$exclude"; fi
    echo "/$module/" >>"$exclude"
  fi
}

remove_module() {
  local tree
  if module_is_ours; then rm -rf "${dir:?}/$module"; fi
  if [ -z "$exclude" ] || ! grep -qsxF "/$module/" "$exclude"; then return; fi
  while read -r tree; do # worktrees share the file
    if [ -d "$tree/$module" ]; then return; fi
  done < <(git -C "$dir" worktree list --porcelain | sed -n 's/^worktree //p')
  grep -vxF "/$module/" "$exclude" >"$backup/exclude.new" || true
  cat "$backup/exclude.new" >"$exclude"
}

# -- all or nothing: what may change is saved first and put back unless finish is reached

begin() {
  backup=$(mktemp -d)
  trap 'rm -rf "$backup"' EXIT
  local name
  rm -rf "${dir:?}/$module.new" "${dir:?}/$module.old" # of a run that was killed
  for name in "${trainers[@]}"; do
    if [ -f "$dir/$(target_of "$name")" ]; then cp -p "$dir/$(target_of "$name")" "$backup/$name"; fi
  done
  if [ -n "$exclude" ] && [ -f "$exclude" ]; then cp -p "$exclude" "$backup/exclude"; fi
  head=''
  if [ -n "$commit" ]; then head=$(git -C "$dir" rev-parse HEAD); fi
  had_module=
  if [ -e "$dir/$module" ] || [ -L "$dir/$module" ]; then had_module=yes; fi
  trap put_back EXIT
}

put_back() {
  local name
  trap '' INT
  if [ -n "$head" ] && { [ -d "$(git_path rebase-apply)" ] || [ "$(git -C "$dir" rev-parse HEAD)" != "$head" ]; }; then
    # Not git am --abort: it wants a clean tree, and objects that a partial clone may lack.
    git -C "$dir" am --quit 2>/dev/null || true
    git -C "$dir" update-ref HEAD "$head" || true # if git holds it: the files are put back all the same
    for name in "${trainers[@]}"; do git -C "$dir" reset --quiet -- "$(target_of "$name")" 2>/dev/null || true; done
  fi
  for name in "${trainers[@]}"; do
    if [ -f "$backup/$name" ] && ! cmp -s "$backup/$name" "$dir/$(target_of "$name")"; then
      cp -p "$backup/$name" "$dir/$(target_of "$name")"
    fi
  done
  if [ -f "$backup/exclude" ]; then
    cmp -s "$backup/exclude" "$exclude" || cp -p "$backup/exclude" "$exclude"
  elif [ -n "$exclude" ]; then
    rm -f "$exclude"
  fi
  rm -rf "${dir:?}/$module.new"
  if [ -d "$dir/$module.old" ]; then
    rm -rf "${dir:?}/$module"
    mv "$dir/$module.old" "$dir/$module"
  elif [ -z "$had_module" ]; then
    rm -rf "${dir:?}/$module"
  fi
  rm -rf "$backup"
}

keep_modes() { # git apply gives a file its default mode
  local name
  for name in "$@"; do chmod --reference="$backup/$name" "$dir/$(target_of "$name")"; done
}

finish() {
  trap - EXIT
  rm -rf "$backup" "${dir:?}/$module.old"
}

# -- reasons to refuse

upstreams_in() { # a directory: those that it has a trainer of
  local upstream patches module file
  for upstream in "${upstreams[@]}"; do
    use "$upstream"
    while read -r file; do
      if [ -f "$1/$file" ]; then
        echo "$upstream"
        break
      fi
    done < <(pin file)
  done
}

require_upstream() { # and use it
  local said found targets
  [ -d "$dir" ] || die 1 "$dir: no such directory" "name your checkout, or let ./apply.sh without an argument clone one"
  mapfile -t found < <(upstreams_in "$dir")
  case ${#found[@]} in
    0)
      mapfile -t targets < <(git config --file "$here/upstream/pins.ini" --get-regexp '^upstream\..*\.file$' | cut -d ' ' -f 2-)
      die 1 "$dir is neither a DanceGRPO nor a Flow-GRPO checkout: it has none of" "${targets[@]}"
      ;;
    1) use "${found[0]}" ;;
    *) die 1 "$dir has trainers of several upstreams (${found[*]})" "give each a folder of its own" ;;
  esac
  if [ -e "$dir/.git" ] && ! said=$(git -C "$dir" rev-parse --git-dir 2>&1); then die 1 "$dir: git can't read it" "$said"; fi
  require_own_trainers
}

require_own_trainers() { # one checkout can't have what --only names of the other upstream
  local others
  if [ ${#only[@]} -eq 0 ] || [ ${#dirs[@]} -gt 1 ]; then return; fi
  mapfile -t others < <(printf '%s\n' "${only[@]}" | grep -vxF "$(all_trainers)")
  [ ${#others[@]} -eq 0 ] || die 1 "$dir: $(pin folder) has no ${others[*]}" "its trainers are $(all_trainers | xargs)"
}

require_room_for_module() {
  local place
  for place in "$dir/${module%/*}" "$exclude"; do
    if [ -e "$place" ] && is_read_only "$place"; then die 1 "$place: it is read-only, and has to change" "make it writable (chmod u+w)"; fi
  done
}

require_no_other_module() {
  if is_other_module; then
    die 1 "$dir/$module: something else is already there" "move it away, then apply again"
  fi
}

require_committable() { # the named trainers
  local name
  git -C "$dir" rev-parse --is-inside-work-tree >/dev/null 2>&1 || die 1 "$dir: --commit needs a git checkout" "do it without --commit"
  git -C "$dir" var GIT_COMMITTER_IDENT >/dev/null 2>&1 || die 1 "$dir: git doesn't know who commits" "set user.name and user.email"
  if [ $# -eq 0 ]; then return; fi
  for name in rebase-apply rebase-merge; do
    if [ -d "$(git_path "$name")" ]; then
      die 1 "$dir: a git am or rebase is in progress" "finish or abort it, then try again"
    fi
  done
  for name in "$@"; do
    git -C "$dir" ls-files --error-unmatch "$(target_of "$name")" >/dev/null 2>&1 ||
      die 1 "$dir/$(target_of "$name"): not tracked by git" "do it without --commit"
  done
  git -C "$dir" diff --cached --quiet || die 1 "$dir: the index has staged changes" "commit or unstage them, then try again"
}

require_unedited() { # the named trainers are as in HEAD
  local name
  for name in "$@"; do
    git -C "$dir" diff --quiet HEAD -- "$(target_of "$name")" ||
      die 1 "$dir/$(target_of "$name"): has changes of yours" "commit or stash them, then try again"
  done
}

committed() { git -C "$dir" show "HEAD:./$(target_of "$1")" 2>/dev/null | grep -F "$hook" >/dev/null; }

# -- the actions

check_row() { # of the table: a trainer, its patch, its contract, what there is to say; returns 1 if it can't be, or would train wrong
  local patch=${state[$1]} contract=${verdict[$1]:-unknown} says=${differs[$1]:-} line first=yes status=0
  case $patch in
    applied | ready) ;;
    *) says=$patch${says:+$'\n'$says} patch=refused status=1 ;;
  esac
  case ${verdict[$1]:-} in broken | unknown) status=1 ;; esac
  while IFS= read -r line; do
    if [ -n "$first" ]; then
      printf '  %-40s %-8s %-9s %s\n' "$(target_of "$1")" "$patch" "$contract" "$line"
    else
      printf '  %-40s %-8s %-9s %s\n' '' '' '' "$line"
    fi
    first=
  done <<<"$says" | sed 's/ *$//'
  return $status
}

do_check() {
  local name file reason status=0
  examine
  printf '  %-40s %-8s %-9s %s\n' trainer patch contract "what differs, and what it means"
  for name in "${trainers[@]}"; do check_row "$name" || status=1; done
  list_absent
  printf '  %-40s %s\n' "$module" "$(module_state)"
  while read -r file reason; do
    if [ ${#only[@]} -eq 0 ] && [ -f "$dir/$file" ]; then printf '  %-40s not supported: %s\n' "$file" "$reason"; fi
  done < <(pin unsupported)
  [ $status -eq 0 ] || die 1 "$dir: a trainer can't be patched, or would train wrong" "to leave it out, name the others with --only"
  require_room_for_module
  require_no_other_module
}

may_apply() { # refuse, or tell what is to be done: patch the trainers `todo`, of which `loose` are patched, but not in a commit
  local name
  loose=()
  examine
  for name in "${trainers[@]}"; do
    case ${state[$name]} in applied | ready) ;; *) continue ;; esac
    case ${verdict[$name]:-} in broken | unknown) state[$name]="the contract is ${verdict[$name]}: ${differs[$name]//$'\n'/; }" ;; esac
  done
  if ! report "" >/dev/null; then
    report "not applied" >&2 || true
    die 1 "$dir: refused; nothing was changed" "to leave a trainer out, name the others with --only"
  fi
  require_room_for_module
  require_no_other_module
  mapfile -t todo < <(in_state ready)
  if [ -n "$commit" ]; then
    for name in $(in_state applied); do
      if ! committed "$name"; then loose+=("$name"); fi # a plain apply came before: git am wants the file as it was
    done
    require_committable "${todo[@]}" "${loose[@]}"
    require_unedited "${todo[@]}"
    todo+=("${loose[@]}")
  fi
}

do_apply() {
  local todo loose name patch_files=()
  may_apply
  begin
  put_module
  if [ -z "$commit" ]; then
    if [ ${#todo[@]} -gt 0 ]; then git_apply -- "${todo[@]}"; fi
  else
    take_out "${loose[@]}"
    require_unedited "${loose[@]}"
    for name in "${todo[@]}"; do patch_files+=("$patches/$name.patch"); done
    if [ ${#todo[@]} -gt 0 ] && ! in_dir am --quiet --directory="$prefix" "${patch_files[@]}" >&2; then
      die 1 "$dir: git am refused the patches (its reason stands above)" "apply without --commit"
    fi
  fi
  for name in "${todo[@]}"; do # git apply's word isn't enough
    has_hook "$name" || die 1 "$dir/$(target_of "$name"): git reported success, but the hook is not there" "please report this, with git --version"
  done
  keep_modes "${todo[@]}"
  finish
  look
  echo "JAGG $(module_version "$here/jagg_patch") in $dir:"
  report ""
  if [ -n "$commit" ]; then echo "the module isn't in the commits: run ./apply.sh on every clone"; fi
  echo "train as before; JAGG_ENABLED=0 turns it off, ./apply.sh --reverse takes it out"
}

may_reverse() { # refuse, or tell what is to be done: take out of the trainers `applied`, of which commits have `were_committed`
  local name
  were_committed=()
  for name in "${trainers[@]}"; do
    if has_hook "$name" && [ "${state[$name]}" != applied ]; then
      die 1 "$dir/$(target_of "$name"): ${state[$name]}" "nothing was changed; to leave it out, name the others with --only"
    fi
  done
  mapfile -t applied < <(in_state applied)
  for name in "${applied[@]}"; do
    if is_read_only "$dir/$(target_of "$name")"; then die 1 "$dir/$(target_of "$name"): the file is read-only" "make it writable (chmod u+w)"; fi
    if committed "$name"; then were_committed+=("$name"); fi
  done
  require_room_for_module
  if [ -n "$commit" ]; then
    require_committable "${were_committed[@]}"
    require_unedited "${were_committed[@]}"
  fi
}

do_reverse() {
  local applied were_committed name files=()
  may_reverse
  begin
  take_out "${applied[@]}"
  keep_modes "${applied[@]}"
  if [ -n "$commit" ] && [ ${#were_committed[@]} -gt 0 ]; then
    for name in "${were_committed[@]}"; do files+=("$(target_of "$name")"); done
    in_dir commit --quiet --only -m "Take JAGG's hook out" -- "${files[@]}" >&2 ||
      die 1 "$dir: git commit refused (its reason stands above)" "reverse without --commit"
    were_committed=()
  fi
  any_hook || remove_module
  finish
  echo "taken out of ${#applied[@]} trainer(s) in $dir"
  for name in "${were_committed[@]}"; do
    echo "  the hook was committed: commit this change too (git commit $(target_of "$name"))"
  done
}

do_refresh() { # or export
  local name files=()
  find_python || die 1 "--$action needs Python 3.10 or later"
  for name in $(selected); do files+=("$(target_of "$name")"); done
  in_python refresh "$action" "$dir" "$upstream" "${files[@]}"
}

do_export() { do_refresh; }

do_status() {
  report "not applied" || true
  printf '  %-40s %s\n' "$module" "$(module_state)"
}

clone_pin() {
  local url commit folder partial
  url=$(pin url) commit=$(pin commit) folder=$(pin folder)
  partial=$here/upstream/.$folder.partial
  echo "cloning $url at ${commit:0:12} into upstream/$folder"
  rm -rf "$partial"
  if ! { git clone --config core.autocrlf=false "$url" "$partial" && check_out "$partial" "$commit"; }; then
    rm -rf "$partial"
    die 1 "could not clone $url" "where there is network: git clone $url && git -C $folder checkout $commit" \
      "then copy the folder here and run ./apply.sh DIR"
  fi
  mv "$partial" "$here/upstream/$folder"
}

check_out() { # a clone, a commit, which may be on no branch
  git -C "$1" checkout --quiet --detach "$2" 2>/dev/null ||
    { git -C "$1" fetch --quiet origin "$2" && git -C "$1" checkout --quiet --detach "$2"; }
}

action=apply commit='' only=() rest=()
while [ $# -gt 0 ]; do
  case $1 in
    --check | --status | --reverse | --demo | --refresh | --export)
      [ "$action" = apply ] || [ "$action" = "${1#--}" ] || bad_usage "$1 and --$action exclude each other"
      action=${1#--}
      ;;
    --commit) commit=yes ;;
    --only)
      [ $# -gt 1 ] || bad_usage "--only needs a trainer"
      every_trainer | grep -xF -e "$2" >/dev/null || bad_usage "--only $2: there is no patch of that name; there are $(every_trainer | xargs)"
      only+=("$2")
      shift
      ;;
    --help | -h)
      usage
      exit 0
      ;;
    -*) bad_usage "unknown option $1" ;;
    '') bad_usage "the directory's name is empty" ;;
    *) rest+=("$1") ;;
  esac
  shift
done
[ ${#rest[@]} -le 1 ] || bad_usage "one directory at most, got ${#rest[@]}"
if [ -n "$commit" ] && [ "$action" != apply ] && [ "$action" != reverse ]; then bad_usage "--commit goes with applying and --reverse"; fi
command -v git >/dev/null || die 1 "git is not installed"

if [ "$action" = demo ] && [ ${#only[@]} -gt 0 ]; then bad_usage "--only doesn't go with --demo"; fi
if [ "$action" = demo ]; then
  python=$("$here/tests/venv.sh" demo)
  exec "$python" "$here/upstream/demo.py" --out "${rest[0]:-$here/demo-output}"
fi

default_dir() { echo "$here/upstream/$(pin folder)"; }

default_dirs() { # into dirs: those of the trainers that --only names, else those that are there, else the first
  local upstream patches module
  for upstream in "${upstreams[@]}"; do
    use "$upstream"
    if [ ${#only[@]} -gt 0 ]; then [ -n "$(named)" ]; else [ -e "$(default_dir)" ]; fi || continue
    dirs+=("$(default_dir)")
  done
  if [ ${#dirs[@]} -eq 0 ]; then
    use "${upstreams[0]}"
    dirs=("$(default_dir)")
  fi
}

clone_if_default() {
  local upstream patches module
  for upstream in "${upstreams[@]}"; do
    use "$upstream"
    if [ "$(realpath -m "$dir")" = "$(default_dir)" ]; then
      require_own_trainers
      clone_pin
    fi
  done
}

enter() { # the checkout dir
  require_upstream
  dir=$(cd "$dir" && pwd -P)
  case $action in apply | reverse) lock ;; esac
  exclude=$(exclude_file)
  prefix=$(git -C "$dir" rev-parse --show-prefix 2>/dev/null || true) # of DIR inside a repository that holds it
  look
}

lock() { # until this run or the next lock ends; where there is no flock, or a file system without, go on
  if command -v flock >/dev/null; then
    exec 9<"$dir"
    flock --nonblock 9 || [ $? -ne 1 ] || die 1 "$dir: another apply.sh is at work there" "let it end, then try again"
  fi
}

in_each() { # a function that changes no checkout, in every one; exit if it refuses one
  local status=0
  for dir in "${dirs[@]}"; do
    if [ ${#dirs[@]} -gt 1 ]; then echo "$dir:"; fi
    set +e
    (
      set -e
      enter
      "$1"
    )
    status=$((status | $?))
    set -e
  done
  [ $status -eq 0 ] || exit 1
}

dirs=("${rest[@]}")
if [ ${#dirs[@]} -eq 0 ] && [ -n "$(upstreams_in .)" ]; then bad_usage "the current folder is a checkout: to mean it, name it ($0 … .)"; fi
if [ ${#dirs[@]} -eq 0 ]; then default_dirs; fi
case $action in
  check | status | refresh | export) in_each "do_$action" ;;
  *)
    for dir in "${dirs[@]}"; do
      if [ "$action" = apply ] && [ ! -e "$dir" ]; then clone_if_default; fi
    done
    if [ ${#dirs[@]} -gt 1 ]; then in_each "may_$action" >/dev/null; fi # before the first is changed
    for dir in "${dirs[@]}"; do
      enter
      "do_$action"
    done
    ;;
esac
