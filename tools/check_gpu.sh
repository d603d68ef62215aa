#!/usr/bin/env bash
# Checks on one GPU what the CPU tests cannot: bf16, fused attention and AdamW, compiled blocks,
# ZeRO over nccl, pinned transfer, memory, speed. About 6 of at most 8 minutes, by estimate.
# Run it in an environment with mimkit and its test extra installed:
#   bash tools/check_gpu.sh [FOLDER FOR THE NUMBERS]
set -euo pipefail
cd "$(dirname "$0")/.."
python -c 'import torch; assert torch.cuda.is_available(), "there is no GPU here"; print(torch.cuda.get_device_name())'
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=${1:-$work}
mkdir -p "$out"
begun=$SECONDS
part() { echo "== $((SECONDS - begun)) s: $1"; }

part "bf16, fused attention and AdamW, compiled blocks, no waiting, pinned transfer (1 min)"
python -m pytest -q -p no:cacheprovider -m gpu tests/test_gpu.py

part "plain PyTorch and ZeRO 1 to 3 on this GPU: the same losses and weights (2 min)"
for stage in 1 2 3; do
    python tools/audit.py engine --ranks 1 engine.zero_stage=$stage engine.precision=fp32
done

part "the default job in bf16, killed and continued (2 min)"
setsid deepspeed tools/pretrain.py output.dir="$work/run" output.checkpoint_every=50 &
launcher=$!
for _ in $(seq 180); do
    if ls "$work"/run/checkpoints/step-* >/dev/null 2>&1; then break; fi
    sleep 1
done
kill -9 -- "-$launcher" # launcher and ranks are one process group
wait "$launcher" || true
deepspeed tools/pretrain.py output.dir="$work/run" output.checkpoint_every=50
python tools/export.py "$work/run" --format timm "$work/encoder.safetensors"
python - "$work/run/summary.json" <<'PY'
import json, sys
s = json.load(open(sys.argv[1]))
assert s["heldout_loss"] < s["unigram_entropy"], s
print({k: s[k] for k in ("heldout_loss", "unigram_entropy", "images_per_second")})
PY

part "the step beside BEiT's: MFU, images/s, memory (2 min)"
python tools/bench.py step --device cuda --size B --batch 64 --precision bf16 --rounds 5 \
    --compile --json "$out/step.json"
python tools/bench.py scaling --step "$out/step.json" --json "$out/scaling.json" >"$out/scaling.md"

part "done: all checks passed"
