
set -u
OUTPUT=@OUTPUT@
LOGS="$OUTPUT/logs"  # a file for every process; process 0 shows the progress of all
mkdir -p "$LOGS" || exit 2
@SETTINGS@
# On preemption this shell keeps running until the processes have saved and exited.
trap 'echo "SIGTERM: the processes save and stop"' TERM

# The nodes of this job that answer, of which the first @NODES@ run; the others are spare.
healthy() {
  sinfo --noheader --Node --nodes="$SLURM_JOB_NODELIST" --format="%N %T" 2>/dev/null |
    awk '$2 !~ /down|fail|unknown|boot|\*$/ && !seen[$1]++ { print $1 }'
}
list() { head -n "$1" | paste -sd, -; }
newest() { ls "$OUTPUT/checkpoints" 2>/dev/null | grep -x '[0-9]*' | sort -n | tail -n 1; }

# Every node must see the same output, recipe and model: a file written here must appear there.
TOKEN="$LOGS/.job-$SLURM_JOB_ID.partial"
echo "$SLURM_JOB_ID" > "$TOKEN" || exit 2
count=$(healthy | wc -l)
[ "$count" -gt 0 ] && srun --ntasks-per-node=1 --nodes="$count" --ntasks="$count" --nodelist="$(healthy | list "$count")" bash -c '
  for attempt in {1..60}; do  # network file systems show new files late
    [ "$(cat "$1" 2>/dev/null)" = "$SLURM_JOB_ID" ] && break
    sleep 1
  done
  for file in "$@"; do
    [ -e "$file" ] || { echo "error: $(hostname) does not see $file: put it on shared storage" >&2; exit 2; }
  done
' check "$TOKEN" @FILES@ || { rm -f "$TOKEN"; [ "$count" -gt 0 ] && exit 2; }
rm -f "$TOKEN"

# Known to the processes of this job alone: others cannot join it.
export MESHTUNE_SECRET="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
restarts=0 before=$(newest)
while :; do
  if [ "$(healthy | wc -l)" -lt @NODES@ ]; then
    reason="fewer than @NODES@ nodes answer" code=@LOST@
    break
  fi
  # The processes find each other through Slurm's own variables. resume=true begins at the start in an empty output.
  srun --nodes=@NODES@ --ntasks=@TASKS@ --nodelist="$(healthy | list @NODES@)" @SRUN@ --wait=120 \
    --open-mode=append --output="$LOGS/process-%t.log" \
    @COMMAND@
  code=$?
  case $code in
    0) echo "finished"; exit 0 ;;
    1|2) echo "failed with exit code $code, which a restart would not change: see $LOGS" >&2; exit $code ;;
    @STOPPED@) reason="stopped by a signal and saved"; break ;;
  esac
  reason="lost a process (exit code $code)"  # @LOST@, or that of the signal that killed it
  now=$(newest)
  [ "$now" != "$before" ] && restarts=0
  before=$now restarts=$((restarts + 1))
  if [ "$restarts" -gt @RESTARTS@ ]; then
    echo "$reason; @RESTARTS@ restarts brought no new checkpoint: giving up" >&2
    exit $code
  fi
  echo "$reason; the processes start again in this allocation"
  sleep 5  # until Slurm knows of a lost node
done

echo "$reason; requeued, to resume from the last checkpoint"
scontrol requeue "$SLURM_JOB_ID"
exit $code
