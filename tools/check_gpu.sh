#!/usr/bin/env bash
# Checks on a GPU what the CPU tests cannot: nccl, bf16 kernels, CUDA memory, the default job there.
# Run it in an environment with mimkit and its test extra installed; it takes some minutes.
#   bash tools/check_gpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python -c 'import torch; assert torch.cuda.is_available(), "there is no GPU here"; print(torch.cuda.get_device_name())'
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "== ZeRO 0-3 and plain PyTorch give the same losses; resume is exact"
pytest -q -p no:cacheprovider tests/train/test_runtimes.py tests/models

echo "== the default job in bf16, killed and continued"
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

echo "== ViT-B/16 at 224 pixels, tokens included: images/s of 30 updates"
deepspeed tools/pretrain.py --config beit_base_hmlp data.train=embedded data.heldout=embedded \
    tokenizer.path=embedded train.epochs=null train.steps=30 train.batch_size=64 \
    output.dir="$work/base" output.log_every=10
grep -h images_per_second "$work/base/summary.json"
echo "all checks passed"
