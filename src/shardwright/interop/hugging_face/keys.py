"""What each key of a published configuration is here, for each model type, as data. A test holds it against transformers' classes.

A key is one of five things, and a key of a class that is none of them fails the test:

computed  ``defaults``: a table of ours has it. A key that a file leaves out has the default of its class.
only      a class computes other values too, or code beside the weights does: any but these is refused.
training  it changes no output, and changes what is learned: any but a neutral value is a warning.
inert     it changes neither.
unread    not a key of the class: its code reads no such key, and neither do we. A warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.core.model.training_only import AUXILIARY_LOSS, LOSS_OF_EACH_SEQUENCE, PREDICTION_LAYERS

NOTHING = (None, False, 0)
"""Values with which a part is absent. They equal 0.0 too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Only:
    """``values``: all that is computed here; of a list or an object, all that its entries may be.

    ``part``: what our table lacks for any other; empty where the class itself does not read the key, and computes as for ``values``.
    """

    values: tuple[object, ...]
    part: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfTraining:
    """``neutral``: with which it changes nothing. ``part``: what is not computed here. ``default``: that of a class; None where it has none."""

    part: str
    neutral: tuple[object, ...] = NOTHING
    default: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedType:
    """One ``model_type``. ``of_class``: the class of transformers' configuration; None where it has none, and nothing has a default.

    ``aliases``: other names that the class has for a key, to that key.
    """

    family: str
    of_class: str | None
    defaults: Mapping[str, object]
    only: Mapping[str, Only] = field(default_factory=dict)
    training: Mapping[str, OfTraining] = field(default_factory=dict)
    inert: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def read(self) -> frozenset[str]:
        """Every key whose meaning here is decided."""
        return frozenset({*self.defaults, *self.only, *self.training, *self.inert, *self.aliases, *ALWAYS_READ})


ALWAYS_READ = (
    *("model_type", "dtype", "torch_dtype", "quantization_config", "_name_or_path", "rope_scaling", "rope_theta"),
    *("tp_plan", "base_model_tp_plan", "_tp_plan", "base_model_ep_plan", "ep_plan", "original_max_position_embeddings"),
    "partial_rotary_factor",
)
"""Keys that any type has a place for here."""

_LABELS = "of a head that classifies: logits here are over the vocabulary"
_OUTPUTS = "which outputs a call returns"
_GENERATION = "of generation"
_OLDER = "of releases of transformers before this class, which no code of it reads"
INERT = {
    "transformers_version": "the release that wrote the file",
    "architectures": "read with the weights",
    "output_hidden_states": _OUTPUTS,
    "output_attentions": _OUTPUTS,
    "_output_attentions": _OUTPUTS,
    "output_scores": _OUTPUTS,
    "return_dict": _OUTPUTS,
    "return_dict_in_generate": _OUTPUTS,
    "chunk_size_feed_forward": "no code of these classes reads it",
    "is_encoder_decoder": "no code of these classes reads it",
    "is_decoder": _OLDER,
    "add_cross_attention": _OLDER,
    "cross_attention_hidden_size": _OLDER,
    "tie_encoder_decoder": _OLDER,
    "torchscript": _OLDER,
    "tf_legacy_loss": _OLDER,
    "use_bfloat16": _OLDER,
    "finetuning_task": _OLDER,
    "task_specific_params": _OLDER,
    "tokenizer_class": "of the tokenizer",
    "prefix": _GENERATION,
    "problem_type": _LABELS,
    "id2label": _LABELS,
    "label2id": _LABELS,
    "num_labels": _LABELS,
    "use_cache": "of generation: keys and values of earlier tokens are kept",
    "pad_token_id": "its row of the embedding has no gradient in transformers; rows here have no padding",
    "bos_token_id": _GENERATION,
    "eos_token_id": _GENERATION,
    "sep_token_id": _GENERATION,
    "decoder_start_token_id": _GENERATION,
    "_commit_hash": "the revision of the file",
    "_attn_implementation": "the kernel of attention",
    "_attn_implementation_internal": "the kernel of attention",
    "attn_implementation": "the kernel of attention",
    "_attn_implementation_autoset": "the kernel of attention",
    "_experts_implementation_internal": "the kernel of experts' products",
    "experts_implementation": "the kernel of experts' products",
    "_post_init_done": "of transformers itself",
    "name_or_path": "the name of the folder",
    **dict.fromkeys(
        (
            *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature"),
            *(
                "diversity_penalty",
                "top_k",
                "top_p",
                "typical_p",
                "repetition_penalty",
                "length_penalty",
                "max_new_tokens",
            ),
            *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"),
            *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "suppress_tokens"),
            *("exponential_decay_length_penalty", "begin_suppress_tokens"),
        ),
        _GENERATION,
    ),
}
"""Keys of every type that change neither outputs nor training, each with the reason."""

_PRETRAINING_TP = {"pretraining_tp": "the same products in as many parts"}

ACTIVATION = Only(values=("silu", "swish"), part="feed-forward layers with another function than SiLU")
NO_BIAS = Only(values=NOTHING, part="biases")
COMMON_ONLY = {
    "hidden_act": ACTIVATION,
    "attention_bias": NO_BIAS,
    "mlp_bias": NO_BIAS,
    "layer_types": Only(values=(None, "full_attention"), part="layers with different kinds of attention"),
    "pruned_heads": Only(values=(None, {}), part="layers with different numbers of heads"),
}
_CODE = "code of its own, in a file beside the weights"
NO_CODE = Only(values=NOTHING, part=_CODE)
NO_TIE = Only(values=NOTHING, part="logits by the weight of the embedding")
DEEPSEEK_CODE = Only(
    values=(
        *NOTHING,
        *(
            name.format(version)
            for version in (2, 3)
            for name in (
                "configuration_deepseek.DeepseekV{}Config",
                "modeling_deepseek.DeepseekV{}Model",
                "modeling_deepseek.DeepseekV{}ForCausalLM",
            )
        ),
    ),
    part=_CODE,
)
"""What DeepSeek published beside its weights before transformers had the classes."""

DROPOUT = {"attention_dropout": OfTraining(part="dropout of attention", default=0.0)}
AUXILIARY = OfTraining(part=AUXILIARY_LOSS)
MIXTRAL_TRAINING = {
    **DROPOUT,
    "router_aux_loss_coef": OfTraining(part=AUXILIARY.part, default=0.001),
    "output_router_logits": OfTraining(part=AUXILIARY.part, default=False),
    "router_jitter_noise": OfTraining(part="noise on the inputs of the router", default=0.0),
}
DEEPSEEK_TRAINING = {
    **DROPOUT,
    "aux_loss_alpha": AUXILIARY,
    "seq_aux": OfTraining(part=LOSS_OF_EACH_SEQUENCE),
}

GROUPED = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "head_dim": None,
    "vocab_size": 32000,
    "initializer_range": 0.02,
    "rope_parameters": None,
}
DEEPSEEK_INERT = {
    **INERT,
    **_PRETRAINING_TP,
    "num_key_value_heads": "latent attention computes keys and values of every head from one latent",
    "head_dim": "the class writes qk_rope_head_dim there",
    "qk_head_dim": "the sum of qk_nope_head_dim and qk_rope_head_dim",
    "ep_size": "how many devices the experts are on",
}
DEEPSEEK_ONLY = {
    **COMMON_ONLY,
    "auto_map": DEEPSEEK_CODE,
    "tie_word_embeddings": NO_TIE,
    "moe_layer_freq": Only(values=(None, 1), part="layers with and without experts in turn"),
}
V3_DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "rope_interleave": True,
}
V3_ONLY = {
    **DEEPSEEK_ONLY,
    "scoring_func": Only(values=(None, "sigmoid")),
    "topk_method": Only(values=(None, "noaux_tc")),
}
V3_TRAINING = {**DEEPSEEK_TRAINING, "num_nextn_predict_layers": OfTraining(part=PREDICTION_LAYERS, default=1)}
V3_INERT = {**DEEPSEEK_INERT, "output_router_logits": _OUTPUTS}

TYPES = {
    "llama": PublishedType(
        family="llama3",
        of_class="LlamaConfig",
        defaults={
            **GROUPED,
            "intermediate_size": 11008,
            "num_key_value_heads": None,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        only={**COMMON_ONLY, "auto_map": NO_CODE},
        training=DROPOUT,
        inert={**INERT, **_PRETRAINING_TP},
    ),
    "mistral": PublishedType(
        family="llama3",
        of_class="MistralConfig",
        defaults={
            **GROUPED,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "sliding_window": 4096,
        },
        only={**COMMON_ONLY, "auto_map": NO_CODE},
        training=DROPOUT,
        inert=INERT,
    ),
    "mixtral": PublishedType(
        family="mixtral",
        of_class="MixtralConfig",
        defaults={
            **GROUPED,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        only={**COMMON_ONLY, "auto_map": NO_CODE, "tie_word_embeddings": NO_TIE},
        training=MIXTRAL_TRAINING,
        inert=INERT,
        aliases={"num_experts": "num_local_experts"},
    ),
    "deepseek_v3": PublishedType(
        family="deepseek3",
        of_class="DeepseekV3Config",
        defaults=V3_DEFAULTS,
        only=V3_ONLY,
        training=V3_TRAINING,
        inert=V3_INERT,
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    ),
    "deepseek_v2": PublishedType(
        family="deepseek3",
        of_class="DeepseekV2Config",
        defaults={
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "initializer_range": 0.02,
            "rms_norm_eps": 1e-6,
            "rope_parameters": None,
            "first_k_dense_replace": 0,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "n_group": None,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "routed_scaling_factor": 1.0,
            "topk_group": None,
            "topk_method": "greedy",
            "v_head_dim": 128,
            "num_experts_per_tok": None,
            "moe_intermediate_size": 1407,
        },
        only={
            **DEEPSEEK_ONLY,
            "scoring_func": Only(values=(None, "softmax")),
            "topk_method": Only(values=(None, "greedy", "group_limited_greedy")),
            "norm_topk_prob": Only(values=(None, False)),
            "rope_interleave": Only(values=(None, True)),
        },
        training=DEEPSEEK_TRAINING,
        inert={**DEEPSEEK_INERT, "output_router_logits": _OUTPUTS},
        aliases={"num_experts": "n_routed_experts"},
    ),
    "kimi_k2": PublishedType(
        family="deepseek3",
        of_class=None,
        # What a file of its kind need not say; everything else it must.
        defaults={
            **dict.fromkeys(V3_DEFAULTS, None),
            "initializer_range": 0.02,
            "rope_interleave": True,
        },
        only=V3_ONLY,
        training={**DEEPSEEK_TRAINING, "num_nextn_predict_layers": OfTraining(part=PREDICTION_LAYERS)},
        inert=V3_INERT,
    ),
}
"""Every ``model_type`` that a family of ours computes. ``kimi_k2`` is published with DeepSeek-V3's code."""
