
set -u
OUTPUT=@OUTPUT@
LOGS="$OUTPUT/logs"  # a file for every process; process 0 shows the progress of all
mkdir -p "$LOGS" || exit 2
@SETTINGS@
# On preemption this shell keeps running until the processes have saved and exited.
trap 'echo "SIGTERM: the processes save and stop"' TERM

# Every node must see the same output, recipe and model: a file written here must appear there.
TOKEN="$LOGS/.job-$SLURM_JOB_ID.partial"
echo "$SLURM_JOB_ID" > "$TOKEN" || exit 2
srun --ntasks-per-node=1 --ntasks="$SLURM_JOB_NUM_NODES" bash -c '
  for attempt in {1..60}; do  # network file systems show new files late
    [ "$(cat "$1" 2>/dev/null)" = "$SLURM_JOB_ID" ] && break
    sleep 1
  done
  for file in "$@"; do
    [ -e "$file" ] || { echo "error: $(hostname) does not see $file: put it on shared storage" >&2; exit 2; }
  done
' check "$TOKEN" @FILES@ || { rm -f "$TOKEN"; exit 2; }
rm -f "$TOKEN"

# Known to the processes of this job alone: others cannot join it.
export MESHTUNE_SECRET="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
# The processes find each other through Slurm's own variables. resume=true starts anew in an empty output.
srun @SRUN@ --wait=120 \
  --open-mode=append --output="$LOGS/process-%t.log" \
  @COMMAND@
code=$?

case $code in
  0) echo "finished"; exit 0 ;;
  1|2) echo "failed with exit code $code, which a restart would not change: see $LOGS" >&2; exit $code ;;
  @STOPPED@) reason="stopped by a signal and saved" ;;
  *) reason="lost a process (exit code $code)"  # @LOST@, or that of the signal that killed it
    # Restarts count in a row of which no newer checkpoint came.
    newest=$(ls "$OUTPUT/checkpoints" 2>/dev/null | grep -x "[0-9]*" | sort -n | tail -1)
    read -r before fruitless 2>/dev/null < "$LOGS/.restarts-$SLURM_JOB_ID"
    [ "${newest:-0}" -gt "${before:-0}" ] && fruitless=0 || fruitless=$((${fruitless:-0} + 1))
    echo "${newest:-0} $fruitless" > "$LOGS/.restarts-$SLURM_JOB_ID"
    if [ "$fruitless" -gt @RESTARTS@ ]; then
      echo "$reason, and no newer checkpoint came of @RESTARTS@ restarts: giving up" >&2
      exit $code
    fi ;;
esac
echo "$reason; requeued, to resume from the last checkpoint"
scontrol requeue "$SLURM_JOB_ID"
exit $code
