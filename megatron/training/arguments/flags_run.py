"""Flags of process groups, data, tokenizer, checkpoints and logs."""

from __future__ import annotations

from megatron.training.arguments.flag import Flag, off_switch, switch, value

DISTRIBUTED: tuple[Flag, ...] = (
    value(
        "--distributed-backend",
        str,
        "nccl",
        "transport of the process groups",
        choices=("nccl", "gloo"),
    ),
    switch(
        "--use-tp-pp-dp-mapping",
        "number ranks over tensor, pipeline, then data parallelism, not tensor, data, pipeline",
    ),
    value("--distributed-timeout-minutes", int, 10, "longest wait for a peer in a collective"),
    value("--local-rank", int, 0, "rank within the node; LOCAL_RANK in the environment wins"),
    value(
        "--num-layers-per-virtual-pipeline-stage",
        int,
        None,
        "interleaved schedule: layers of one model chunk",
    ),
    value(
        "--num-virtual-stages-per-pipeline-rank",
        int,
        None,
        "interleaved schedule: model chunks on one pipeline rank",
    ),
    off_switch(
        "--no-align-grad-reduce",
        "align_grad_reduce",
        "let each pipeline stage start reducing gradients on its own",
    ),
    value("--ddp-num-buckets", int, None, "gradient buckets; this or --ddp-bucket-size"),
    off_switch(
        "--disable-gloo-process-groups",
        "enable_gloo_process_groups",
        "do not make the additional gloo groups",
    ),
)

DATA: tuple[Flag, ...] = (
    value(
        "--data-path",
        str,
        None,
        "prefix of a .bin/.idx pair, or weights and prefixes by turns for a blend",
        nargs="*",
    ),
    value("--split", str, None, "shares of training, validation and test, as 969,30,1"),
    value("--train-data-path", str, None, "prefixes for training alone", nargs="*"),
    value("--valid-data-path", str, None, "prefixes for validation alone", nargs="*"),
    value("--test-data-path", str, None, "prefixes for test alone", nargs="*"),
    value("--data-args-path", str, None, "file that holds the words of --data-path"),
    value(
        "--per-split-data-args-path",
        str,
        None,
        "JSON file with the keys train, valid and test, each a list of prefixes",
    ),
    value(
        "--per-dataset-sequences-path",
        str,
        None,
        "JSON file with the number of sequences of each prefix, so that none is opened to count",
    ),
    switch("--dataloader-fast-cache-load", "trust that the index files in the cache are complete"),
    switch("--dataloader-defer-npy-index-mmap", "map index files at the first read of a sample"),
    off_switch(
        "--no-data-sharding",
        "data_sharding",
        "with --dataloader-type cyclic: shuffle over all samples, not within each rank's share",
    ),
    value("--data-cache-path", str, None, "folder for the index files that datasets build"),
    off_switch("--no-mmap-bin-files", "mmap_bin_files", "read .bin files without mapping them"),
    switch("--mock-data", "invented data of the right shape"),
    value("--seq-length", int, None, "tokens of one sample"),
    value("--num-workers", int, 2, "processes that load data, per rank"),
    value(
        "--dataloader-type",
        str,
        None,
        "single: one pass in order (the default); cyclic: endless random order",
        choices=("single", "cyclic", "external"),
    ),
    switch("--reset-position-ids", "positions start again after an end-of-document token"),
    switch("--reset-attention-mask", "attention does not look past an end-of-document token"),
    switch("--eod-mask-loss", "end-of-document tokens do not count in the loss"),
    off_switch(
        "--no-create-attention-mask-in-dataloader",
        "create_attention_mask_in_dataloader",
        "leave the causal mask to the attention kernel",
    ),
    value("--num-dataset-builder-threads", int, 1, "threads a rank builds datasets with"),
    value(
        "--mid-level-dataset-surplus",
        float,
        0.005,
        "share of extra samples each dataset of a blend prepares",
    ),
    switch(
        "--allow-ambiguous-pad-tokens",
        "accept a tokenizer whose padding token is also an ordinary one",
    ),
)

TOKENIZERS = (
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "MultimodalTokenizer",
    "NullTokenizer",
    "NullMultimodalTokenizer",
    "SFTTokenizer",
    "ByteTokenizer",
)

TOKENIZER: tuple[Flag, ...] = (
    value(
        "--tokenizer-type",
        str,
        None,
        "default GPT2BPETokenizer; ByteTokenizer needs no file and is this driver's own",
        choices=TOKENIZERS,
    ),
    value("--tokenizer-model", str, None, "file, folder or name that the tokenizer loads"),
    value("--vocab-size", int, None, "size of the vocabulary before padding (NullTokenizer)"),
    value("--padded-vocab-size", int, None, "rows of the embedding, instead of computing them"),
    value("--vocab-file", str, None, "vocabulary file (GPT2BPETokenizer)"),
    value("--merge-file", str, None, "merge rules (GPT2BPETokenizer)"),
    value("--vocab-extra-ids", int, 0, "additional ids after the vocabulary"),
    switch("--tokenizer-hf-use-fast", "accepted for old scripts: it is always so"),
    switch("--tokenizer-hf-include-special-tokens", "add a Hugging Face tokenizer's own tokens"),
    switch("--trust-remote-code", "let a Hugging Face tokenizer run code that comes with it"),
    value("--tokenizer-special-tokens", str, None, "additional special tokens", nargs="+"),
    switch("--tokenizer-sentencepiece-legacy", "SentencePiece tokenizer with its older treatment"),
    switch("--legacy-tokenizer", "accepted for old scripts: tokenizers here are one family"),
)

CHECKPOINT: tuple[Flag, ...] = (
    value("--save", str, None, "folder to save checkpoints in"),
    value(
        "--save-interval --persistent-save-interval",
        int,
        None,
        "iterations between two checkpoints; needed with --save",
    ),
    value(
        "--save-retain-interval",
        int,
        None,
        "keep checkpoints of iterations divisible by this, remove the ones between",
    ),
    switch("--no-save-optim", "leave the optimizer out of the checkpoint", default=None),
    switch("--no-save-rng", "leave generator states out of the checkpoint", default=None),
    value("--load", str, None, "folder to load a checkpoint from"),
    switch("--no-load-optim", "do not load the optimizer", default=None),
    switch("--no-load-rng", "do not load generator states", default=None),
    switch("--finetune", "load the weights alone and start at iteration 0"),
    value("--ckpt-step", int, None, "the iteration to load instead of the latest"),
    switch("--use-checkpoint-args", "take the model's shape from the checkpoint"),
    off_switch(
        "--no-use-tokenizer-model-from-checkpoint-args"
        " --disable-use-tokenizer-model-from-checkpoint-args",
        "use_tokenizer_model_from_checkpoint_args",
        "with --use-checkpoint-args: keep this command line's tokenizer",
    ),
    switch("--exit-on-missing-checkpoint", "leave if --load finds nothing"),
    value(
        "--ckpt-format",
        str,
        "torch_dist",
        "format of checkpoints",
        choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
    ),
    off_switch(
        "--no-ckpt-fully-parallel-save --disable-ckpt-fully-parallel-save",
        "ckpt_fully_parallel_save",
        "the first data-parallel rank saves everything",
    ),
    switch("--ckpt-fully-parallel-load", "data-parallel ranks share the reading"),
    value(
        "--dist-ckpt-strictness",
        str,
        "assume_ok_unexpected",
        "what to do about keys that do not match on loading",
        choices=(
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "raise_unexpected",
            "raise_all",
            "return_unexpected",
            "return_all",
            "ignore_all",
        ),
    ),
    switch(
        "--use-dist-ckpt",
        "accepted for old scripts: see --ckpt-format",
        dest="use_dist_ckpt_deprecated",
    ),
    value(
        "--dist-ckpt-format",
        str,
        None,
        "accepted for old scripts: see --ckpt-format",
        dest="dist_ckpt_format_deprecated",
    ),
    switch(
        "--ckpt-fully-parallel-save",
        "accepted for old scripts: it is the default",
        dest="ckpt_fully_parallel_save_deprecated",
    ),
)

LOGGING: tuple[Flag, ...] = (
    value("--log-interval", int, 100, "iterations between two log lines"),
    switch("--log-params-norm", "log the norm of the parameters"),
    switch("--log-throughput", "log TFLOP/s per device"),
    value(
        "--timing-log-level",
        int,
        0,
        "0: the iteration; 1: its main parts; 2: every part",
        choices=(0, 1, 2),
    ),
    value(
        "--timing-log-option",
        str,
        "minmax",
        "of the times of all ranks, what to log",
        choices=("max", "minmax", "all"),
    ),
    value("--tensorboard-dir", str, None, "folder for TensorBoard"),
    value("--tensorboard-log-interval", int, 1, "iterations between two TensorBoard points"),
    value("--tensorboard-queue-size", int, 1000, "points TensorBoard may hold back"),
    switch("--log-timers-to-tensorboard", "times of the parts of an iteration to TensorBoard"),
    off_switch(
        "--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard",
        "log_loss_scale_to_tensorboard",
        "leave the loss scale out of TensorBoard",
    ),
    switch("--log-validation-ppl-to-tensorboard", "validation perplexity to TensorBoard"),
    switch("--log-memory-to-tensorboard", "device memory to TensorBoard"),
    switch("--log-world-size-to-tensorboard", "number of ranks to TensorBoard"),
    value("--logging-level", int, None, "level of Python's logging, as 20 for INFO"),
)
