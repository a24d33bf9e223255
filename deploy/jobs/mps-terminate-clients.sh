#!/bin/sh
# Ends the CUDA work of chosen MPS clients through their control daemon (terminate_client), so that
# their processes can be killed afterwards without harm to other clients.
#
# A client that is killed while its kernels run leaves that work behind: about 0.2 s later the MPS
# server meets a fatal fault, and every busy client on it dies (driver 580: 3 of 3 neighbours; with
# this first: 0 of 3). Documentation: docs/slurm.md, "Ending jobs".
#
# Needs a POSIX shell, /proc, coreutils or busybox, and nvidia-cuda-mps-control.
set -u
set -f # nothing that is read from elsewhere is ever a pattern of file names
export LC_ALL=C
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin # Slurm's scripts get none

NAME=mps-terminate-clients
INITIAL_PID_NAMESPACE=4026531836 # PROC_PID_INIT_INO, the same on every Linux
MAX_LINE_BYTES=250 # more than the columns before COMMAND, which other users choose
MAX_REPLY_BYTES=32768
NEWLINE='
'

usage() {
  cat <<'HELP'
Usage: mps-terminate-clients.sh SELECTION... [OPTION...]

Terminates, through their control daemon, the MPS clients that meet every condition of SELECTION.
It sends no signal: kill the processes afterwards.

Selection (at least one; a client must meet all that are given):
  --slurm-job ID        it is in the control group of this Slurm job
  --cgroup PATH         its control group is PATH (as in /proc/PID/cgroup), or below
  --descendant-of PID   it is this process or one of its descendants
  --pid PID             it is this process
  --uid UID             it runs as this user (a number)
  --own-pid-namespace   it is in this script's own PID namespace: for a preStop hook, which runs in
                        the container, where the daemon's PIDs cannot be looked up. Stands alone.

Options:
  --pipe-directory DIR  the daemon's pipe directory; may be repeated. Default: those of
                        CUDA_MPS_PIPE_DIRECTORY, of the daemons in /proc that belong to root, to the
                        caller or to --uid, and the two default directories.
  --control FILE        the control tool (default: nvidia-cuda-mps-control)
  --timeout SECONDS     for each answer of a daemon (default 3)
  --deadline SECONDS    for everything (default 15); what is not done by then is left
  --dry-run             say what would be terminated; the daemons are only asked
  --quiet               say nothing but errors
  --help

Exit status:
  0  every client that was selected is terminated or gone, or there was none, or no daemon runs
  1  at least one selected client could not be terminated: killing it can end its neighbours
  2  wrong usage; nothing was done
  3  a daemon could not tell its clients (no answer in time, no tool): whether any of them was
     selected is not known
HELP
}

say() { [ -n "$quiet" ] || printf '%s: %s\n' "$NAME" "$*" >&2; }
complain() { printf '%s: %s\n' "$NAME" "$*" >&2; }
wrong_usage() {
  complain "$1 (--help shows the usage)"
  exit 2
}

is_number() {
  case $1 in '' | *[!0-9]* | ???????????*) return 1 ;; esac
}

visible() { # TEXT that others wrote -> one short line
  printf '%s' "$1" | tr -c '[:print:]' ' ' | head -c 200
}

add_directory() { # DIRECTORY, once
  case $NEWLINE$directories in *"$NEWLINE$1$NEWLINE"*) return ;; esac
  case $1 in '' | *"$NEWLINE"*) return ;; esac
  directories="$directories$1$NEWLINE"
}

seconds_up() {
  read -r up _ </proc/uptime
  printf '%s' "${up%%.*}"
}

# ------------------------------------------------------------------------------- arguments

job='' cgroup='' ancestor='' pid_wanted='' uid_wanted='' own_namespace='' selected=''
directories='' control=nvidia-cuda-mps-control limit=3 deadline=15 dry_run='' quiet=''

while [ $# -gt 0 ]; do
  option=$1
  case $option in
    --help) usage && exit 0 ;;
    --dry-run) dry_run=yes ;;
    --quiet) quiet=yes ;;
    --own-pid-namespace) own_namespace=yes selected="$selected namespace" ;;
    --slurm-job | --cgroup | --descendant-of | --pid | --uid | --pipe-directory | --control | \
      --timeout | --deadline)
      [ $# -ge 2 ] || wrong_usage "$option needs a value"
      value=$2
      shift
      case $option in
        --slurm-job | --descendant-of | --pid | --uid | --timeout | --deadline)
          is_number "$value" || wrong_usage "$option needs a number, not '$(visible "$value")'" ;;
        --cgroup)
          case $value in /?*) ;; *) wrong_usage '--cgroup needs a path below /' ;; esac ;;
        *)
          [ -n "$value" ] || wrong_usage "$option needs a value"
          case $value in *"$NEWLINE"*) wrong_usage "$option cannot hold a line break" ;; esac ;;
      esac
      case $option in
        --slurm-job) job=$value selected="$selected job" ;;
        --cgroup) cgroup=${value%/} selected="$selected cgroup" ;;
        --descendant-of) ancestor=$value selected="$selected descendants" ;;
        --pid) pid_wanted=$value selected="$selected pid" ;;
        --uid) uid_wanted=$value selected="$selected uid" ;;
        --pipe-directory) add_directory "$value" ;;
        --control) control=$value ;;
        --timeout) limit=$value ;;
        --deadline) deadline=$value ;;
      esac
      ;;
    *) wrong_usage "unknown argument '$(visible "$option")'" ;;
  esac
  shift
done

[ -n "$selected" ] || wrong_usage 'nothing is selected'
[ "$limit" -gt 0 ] || wrong_usage '--timeout must be above 0'
[ "$deadline" -gt 0 ] || wrong_usage '--deadline must be above 0'
for number in "$ancestor" "$pid_wanted"; do
  case $number in 0*) wrong_usage 'a PID must be above 0' ;; esac
done
my_namespace=$(readlink /proc/self/ns/pid)
my_namespace=${my_namespace#pid:\[}
my_namespace=${my_namespace%\]}
if [ -n "$own_namespace" ]; then
  [ "$selected" = ' namespace' ] || wrong_usage '--own-pid-namespace stands alone'
  is_number "$my_namespace" || wrong_usage 'the own PID namespace cannot be read'
  [ "$my_namespace" != "$INITIAL_PID_NAMESPACE" ] ||
    wrong_usage '--own-pid-namespace is for containers; here it would select the whole host'
fi

end=$(($(seconds_up) + deadline))
failed=0 unknown=0 done_count=0

# --------------------------------------------------------------------------- asking a daemon

# ask DIRECTORY COMMAND [FENCE] -> the reply in $reply, and 0; 1: no daemon runs there; 2: it
# refused, or the tool cannot be run; 3: no answer in time. FENCE is a second command of the same
# run, with an answer always: without it, an empty answer and a collision with another caller look
# the same. A refusal is tried again: callers collide (nearly a third of calls with three others).
ask() {
  tries=0
  while :; do
    left=$((end - $(seconds_up)))
    [ "$left" -gt 0 ] || {
      reply='no time is left'
      return 3
    }
    [ "$left" -lt "$limit" ] || left=$limit
    # The status comes last, so that it is not there when the reply is cut off.
    reply=$(
      printf '%s\n' "$2" ${3:+"$3"} | {
        CUDA_MPS_PIPE_DIRECTORY=$1 timeout -k 1 "$left" "$control" 2>&1
        printf '\nstatus=%s\n' "$?"
      } 2>/dev/null | cut -b "1-$MAX_LINE_BYTES" | head -c "$MAX_REPLY_BYTES" | tr -d '\000'
    )
    status=$(printf '%s\n' "$reply" | tail -n 1)
    case $status in
      status=*)
        reply=${reply%"$status"}
        reply=${reply%"$NEWLINE"}
        reply=${reply%"$NEWLINE"}
        status=${status#status=}
        ;;
    esac
    case $status in
      124 | 137)
        reply='no answer in time'
        return 3
        ;;
      126 | 127) # there is no tool, or no `timeout`
        [ -S "$1/control" ] || return 1
        return 2
        ;;
    esac
    case $reply in *'Cannot find MPS control daemon'*) return 1 ;; esac
    [ "$status" = 0 ] && [ -n "$reply" ] && return 0
    tries=$((tries + 1))
    [ "$tries" -lt 6 ] || {
      reply=${reply:-an empty answer}
      return 2
    }
    sleep 0.1
  done
}

FENCE=get_default_active_thread_percentage # answers with one decimal number

# ---------------------------------------------------------------------------------- processes

# look PID -> its $state, $parent, $start_time and $owner; 1: it is gone
look() {
  { line=$(cat "/proc/$1/stat"); } 2>/dev/null || return 1
  line=${line##*) } # the name before it can hold anything
  # shellcheck disable=SC2086 # to be split
  set -- "$1" $line
  [ $# -ge 21 ] || return 1
  state=$2 parent=$3 start_time=${21}
  owner=''
  while read -r key _ effective _; do
    [ "$key" != Uid: ] || owner=$effective
  done 2>/dev/null <"/proc/$1/status" || return 1
  [ -n "$owner" ]
}

is_descendant() { # PID
  one=$1
  while [ "$one" != "$ancestor" ]; do
    [ "$one" -gt 1 ] && look "$one" || return 1
    one=$parent
  done
}

in_group() { # PID
  { groups=$(cat "/proc/$1/cgroup"); } 2>/dev/null || return 1
  while IFS=: read -r _ _ path; do
    if [ -n "$cgroup" ]; then
      case $path/ in "$cgroup"/*) return 0 ;; esac
    else
      case $path/ in
        */slurmstepd.scope/job_"$job"/* | */*_slurmstepd.scope/job_"$job"/* | \
          */slurm/job_"$job"/* | */slurm/*/job_"$job"/* | */slurm_*/job_"$job"/*) return 0 ;;
      esac
    fi
  done <<GROUPS
$groups
GROUPS
  return 1
}

# is_selected PID NAMESPACE -> 0: it is, and its $start_time; 1: it is not; 2: cannot be told
is_selected() {
  [ -z "$pid_wanted" ] || [ "$1" = "$pid_wanted" ] || return 1
  [ -z "$ancestor" ] || is_descendant "$1" || return 1
  [ -z "$job$cgroup" ] || in_group_all "$1" || return 1
  look "$1" || return 1
  [ "$start_time" -le "$listed_at" ] || return 1 # another process, with the PID of one that ended
  [ -z "$uid_wanted" ] || [ "$owner" = "$uid_wanted" ] || return 1
  # A daemon in another PID namespace means another process by the same number.
  link=$(readlink "/proc/$1/ns/pid") || {
    [ -d "/proc/$1" ] || return 1
    return 2
  }
  [ "$link" = "pid:[$2]" ]
}

in_group_all() { # PID: it is in the job and in the control group, whichever of them are given
  if [ -n "$job" ] && [ -n "$cgroup" ]; then
    (cgroup='' && in_group "$1") && (job='' && in_group "$1")
  else
    in_group "$1"
  fi
}

stopped_here() { # whether a stopped process of this namespace has CUDA in it
  for number in $(set +f && cd /proc && echo [0-9]*); do
    look "$number" || continue
    case $state in
      T | t) while read -r mapping; do
        case $mapping in *libcuda.so*) return 0 ;; esac
      done 2>/dev/null <"/proc/$number/maps" ;;
    esac
  done
  return 1
}

# ------------------------------------------------------------------------------------ clients

field() { # NUMBER WORD... -> that word
  shift "$1"
  printf '%s' "${1-}"
}

# list DIRECTORY -> $clients: a line for each, "PID ID SERVER NAMESPACE"; else the status of ask
list() {
  look self && listed_at=$start_time # of the program that reads it: now, in the kernel's ticks
  ask "$1" ps "$FENCE" || return $?
  clients='' column_pid='' column_id='' column_server='' column_namespace='' fenced=''
  while read -r line; do
    # shellcheck disable=SC2086 # to be split
    set -- $line
    [ $# -gt 0 ] || continue
    if [ -z "$column_pid" ] && [ "$1" = PID ]; then
      number=0
      for word; do
        number=$((number + 1))
        case $word in
          PID) column_pid=$number ;;
          ID) column_id=$number ;;
          SERVER) column_server=$number ;;
          NAMESPACE) column_namespace=$number ;;
        esac
      done
    elif [ $# -eq 1 ] && [ "${1#*.}" != "$1" ]; then
      fenced=yes
    elif [ "$line" = 'Server not found' ]; then
      continue
    elif [ -n "$column_pid$column_id" ] && [ -n "$column_server" ] && [ -n "$column_namespace" ]; then
      clients="$clients$(field "$column_pid" "$@") $(field "$column_id" "$@")"
      clients="$clients $(field "$column_server" "$@") $(field "$column_namespace" "$@")$NEWLINE"
    else
      return 2
    fi
  done <<REPLY
$reply
REPLY
  [ -n "$fenced" ] || return 2
}

is_client() { # LINE of $clients
  case $NEWLINE$clients in *"$NEWLINE$1$NEWLINE"*) return 0 ;; esac
  return 1
}

# COMMAND is what another user's program calls itself: with a line break in it, it could make up rows.
is_ambiguous() { # $pid $server $namespace, of $found
  while read -r other_pid _ other_server other_namespace; do
    [ "$other_pid" != "$pid" ] || [ "$other_server $other_namespace" = "$server $namespace" ] || return 0
  done <<FOUND
$found
FOUND
  return 1
}

leave() { # WHY: a selected client that is not terminated
  failed=$((failed + 1))
  complain "client $pid of server $server at $(visible "$directory") was not terminated: $1"
}

# end_client: $pid $id $server $namespace of $directory. 1: ask this daemon nothing more.
end_client() {
  if [ -z "$own_namespace" ]; then
    is_selected "$pid" "$namespace"
    case $? in
      1) return 0 ;;
      2)
        leave 'its PID namespace cannot be read; run this as root or as its user'
        return 0
        ;;
    esac
    # Terminating a stopped process can block the daemon for every user.
    case $state in T | t)
      leave 'its process is stopped; continue it first (kill -CONT)'
      return 0
      ;;
    esac
    seen=$start_time
  fi
  if [ -n "$dry_run" ]; then
    say "would terminate client $pid of server $server at $(visible "$directory")"
    done_count=$((done_count + 1))
    return 0
  fi
  # Is it still the one that was looked at? In a container its process cannot be looked up, but the
  # server gives every client an ID of its own.
  if [ -n "$own_namespace" ]; then
    list "$directory" || {
      leave "$(visible "$reply")"
      return 1
    }
    is_client "$pid $id $server $namespace" || return 0
  else
    look "$pid" && [ "$start_time" = "$seen" ] || return 0
  fi
  ask "$directory" "terminate_client $server $pid"
  answer=$?
  if [ "$answer" -eq 3 ]; then
    leave "$(visible "$reply"); no other client of this daemon was tried"
    return 1
  fi
  case $answer$reply in
    00)
      done_count=$((done_count + 1))
      say "terminated client $pid of server $server at $(visible "$directory")"
      return 0
      ;;
    # CUDA_ERROR_INVALID_CONTEXT: it was terminated before, or has ended meanwhile.
    0201 | 0'Server '*' not found' | 1*) ;;
    *)
      if [ -n "$own_namespace" ] || { look "$pid" && [ "$start_time" = "$seen" ]; }; then
        leave "the daemon answered '$(visible "$reply")'"
        return 0
      fi
      ;;
  esac
  say "client $pid of server $server at $(visible "$directory") had ended"
}

# ------------------------------------------------------------------------------------ daemons

# can_be_asked SERVER -> 1: it is stopped, dead or deaf, and a question would block its daemon
can_be_asked() {
  tries=0
  { read -r comm <"/proc/$1/comm"; } 2>/dev/null
  [ "${comm-}" = nvidia-cuda-mps ] || return 0 # it cannot be seen from here
  while look "$1"; do
    case $state in
      R | S) return 0 ;;
      D) tries=$((tries + 1)) ;; # mostly for a moment
      *) return 1 ;;
    esac
    [ "$tries" -lt 10 ] || return 1
    sleep 0.1
  done
  return 0
}

give_up() { # WHY: the clients of $directory are not known
  unknown=$((unknown + 1))
  complain "the clients of $(visible "$directory") are not known: $1"
}

of_daemon() {
  # The daemon answers this alone; all else it passes to a server, and is blocked if that is stuck.
  ask "$directory" get_server_list "$FENCE"
  case $? in
    0) ;;
    1)
      say "no daemon runs at $(visible "$directory")"
      return
      ;;
    *)
      give_up "$(visible "$reply")"
      return
      ;;
  esac
  servers='' fenced=''
  while read -r line; do
    case $line in
      '') ;;
      *[!0-9.]*) servers="$servers $line" ;;
      *.*) fenced=yes ;;
      *) servers="$servers $line" ;;
    esac
  done <<REPLY
$reply
REPLY
  for server in $servers; do
    is_number "$server" || fenced=''
  done
  if [ -z "$fenced" ]; then
    give_up "the answer is not understood: $(visible "$reply")"
    return
  fi
  [ -n "$servers" ] || return
  for server in $servers; do
    can_be_asked "$server" || {
      give_up "server $server does not run (state $state); it was not asked"
      return
    }
  done
  if [ -n "$own_namespace" ] && stopped_here; then
    give_up 'a stopped process here has CUDA in it; continue it first (kill -CONT)'
    return
  fi
  list "$directory" || {
    give_up "$(visible "$reply")"
    return
  }
  found=$clients
  hidden=0
  while read -r pid id server namespace; do
    [ -n "$pid" ] || continue
    if ! is_number "$pid" || [ "$pid" -eq 0 ] || ! is_number "$server" || ! is_number "$namespace"; then
      hidden=$((hidden + 1))
    elif [ -n "$own_namespace" ] && [ "$namespace" != "$my_namespace" ]; then
      :
    elif [ -n "$own_namespace" ] && is_ambiguous; then
      leave 'the daemon lists its PID twice, differently'
    else
      end_client || break
    fi
  done <<CLIENTS
$found
CLIENTS
  [ "$hidden" -eq 0 ] ||
    give_up "$hidden of them are in a PID namespace that the daemon cannot see; start it with the host's"
}

# Daemons of other users are left out: they decide what is answered there, and when.
find_directories() {
  add_directory "${CUDA_MPS_PIPE_DIRECTORY-}"
  me=$(id -u)
  my_mounts=$(readlink /proc/self/ns/mnt)
  for number in $(set +f && cd /proc && echo [0-9]*); do
    { read -r comm <"/proc/$number/comm"; } 2>/dev/null || continue
    [ "$comm" = nvidia-cuda-mps ] || continue
    case $(tr '\000' ' ' 2>/dev/null <"/proc/$number/cmdline") in
      *nvidia-cuda-mps-control*) ;;
      *) continue ;;
    esac
    look "$number" || continue
    case $owner in 0 | "$me" | "$uid_wanted") ;; *) continue ;; esac
    place=$(
      { tr '\n\000' ' \n' <"/proc/$number/environ"; } 2>/dev/null |
        while read -r variable; do
          case $variable in CUDA_MPS_PIPE_DIRECTORY=*)
            printf '%s' "${variable#*=}"
            break
            ;;
          esac
        done
    )
    root=''
    mounts=$(readlink "/proc/$number/ns/mnt") && [ "$mounts" != "$my_mounts" ] &&
      root=/proc/$number/root
    [ -z "$place" ] || add_directory "$root${place%/}"
    [ -z "$root" ] || [ -n "$place" ] || add_directory "$root/tmp/nvidia-mps"
  done
  for place in /tmp/nvidia-mps /run/nvidia-mps; do
    [ ! -S "$place/control" ] || add_directory "$place"
  done
}

[ -n "$directories" ] || find_directories
if [ -z "$directories" ]; then
  say 'no MPS control daemon was found'
  exit 0
fi
while read -r directory; do
  [ -z "$directory" ] || of_daemon
done <<DIRECTORIES
$directories
DIRECTORIES

if [ "$failed" -gt 0 ]; then exit 1; fi
if [ "$unknown" -gt 0 ]; then exit 3; fi
[ "$done_count" -gt 0 ] || say 'no client is selected'
