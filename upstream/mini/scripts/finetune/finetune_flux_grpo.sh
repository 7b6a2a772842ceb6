#!/usr/bin/env bash
# Fine-tune the digit model: two ranks on one machine. Output goes to $OUTPUT_DIR, the seed is $SEED; flags are added to those below.
torchrun --standalone --nproc_per_node=2 \
    fastvideo/train_grpo_flux.py \
    --seed "${SEED:-42}" \
    --pretrained_model_name_or_path data/flux \
    --output_dir "${OUTPUT_DIR:-data/outputs/grpo}" \
    --gradient_checkpointing \
    --train_batch_size 5 \
    --num_generations 12 \
    --micro_batch_size 20 \
    --use_group \
    --gradient_accumulation_steps 3 \
    --max_train_steps 30 \
    --learning_rate 3e-4 \
    --sampling_steps 16 \
    --timestep_fraction 0.6 \
    --eta 0.7 \
    --shift 3 \
    "$@"
