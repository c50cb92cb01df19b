"""Settings of a folder that no code here reads, with the reason why they change no answer.

A setting that is read is carried over, or refused by the code that reads it. Any other stands in
`WITHOUT_EFFECT`, or in `NEUTRAL` with the values that have no effect, or the folder is refused: a
setting that nobody here knows may change answers. Files are known by name; MODULE is the
config.json of a module of sentence-transformers.
"""

import json
from collections.abc import Mapping
from typing import Any

from transferry.build_model.importing.huggingface.folder import (
    CONFIG,
    GENERATION,
    SPECIAL_TOKENS,
    TOKENIZER_CONFIG,
    Settings,
)
from transferry.build_model.importing.huggingface.generation import (
    SAME_TOKENS,
    SEARCH_SETTINGS,
    TOKENS,
)
from transferry.runtime.errors import InputError

MODULE, SENTENCE = "module", "config_sentence_transformers.json"
READING = "sentence_bert_config.json"
ANY = "*"  # every other key of a file
OLD = "force_bos_token_to_be_generated"
MOST_SHOWN = 60  # characters of a value in an error

TRAINING = "of training"
MEMORY = "of speed, memory or further outputs"
RECORD = "a record of how the folder was made"
LABELS = "names of labels and heads, read where a head is imported"
PIPELINE = "read by pipelines of transformers, not by its models"
FILES = "the tensors decide"
NOT_READ = "not read by the model type in transformers"

WITHOUT_EFFECT: Mapping[str, Mapping[str, str]] = {
    CONFIG: {
        TRAINING: (
            "activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop "
            "classif_dropout classifier_dropout classifier_dropout_prob cls_dropout "
            "decoder_layerdrop dropout dropout_rate embd_pdrop embedding_dropout "
            "encoder_layerdrop freeze_encoder gradient_checkpointing hidden_dropout "
            "hidden_dropout_prob init_std "
            "initializer_cutoff_factor initializer_factor initializer_range layer_norm_dropout "
            "label_smoothing layerdrop learning_rate loss_type mlp_dropout mup "
            "pooler_dropout qa_dropout repad_logits_with_grad resid_pdrop residual_dropout "
            "router_aux_loss_coef save_step seq_classif_dropout seq_length sinusoidal_pos_embds "
            "sparse_pred_ignore_index "
            "sparse_prediction summary_first_dropout summary_last_dropout tf_legacy_loss "
            "tie_weights_ train_batch_size"
        ),
        MEMORY: (
            "_attn_implementation _attn_implementation_autoset _attn_implementation_internal "
            "_flash_attn_2_enabled amp attn_implementation bf16 cache_implementation "
            "chunk_size_feed_forward deterministic_flash_attn dtype fp16 model_parallel "
            "output_attentions output_hidden_states dense_seq_output fused_bias_fc "
            "fused_dropout_add_ln output_past pack_qkv pretraining_tp reference_compile "
            "reorder_and_upcast_attn return_dict torch_dtype torchscript transformers.js_config "
            "use_bfloat16 use_cache unpad_inputs use_amp use_flash_attn use_liger_kernel "
            "use_memory_efficient_attention use_xentropy"
        ),
        RECORD: (
            "_commit_hash _diffusers_version _name_or_path _num_labels adapters architectures "
            "auto_map base_model base_model_name_or_path bos_token cache_dir custom_pipelines "
            "dataset eos_token finetuning_task is_encoder_decoder is_llama_config "
            "keys_to_ignore_at_inference language library_name license max_seq_length "
            "max_sequence_length metrics model_max_length model_name model_type name_or_path "
            "neuron pipeline_tag revision seed tags tokenizer tokenizer_class tokenizer_name "
            "total_flos transformers_version trust_remote_code unsloth_fixed unsloth_version "
            "vocab_file"
        ),
        LABELS: (
            "classifier_activation classifier_bias classifier_pooling cls_token_id "
            "directionality id2label label2id mask_token_id num_labels pooler_fc_size "
            "pooler_hidden_act pooler_num_attention_heads pooler_num_fc_layers "
            "pooler_size_per_head pooler_type problem_type "
            "sbert_ce_default_activation_function sentence_transformers "
            "sep_token_id summary_activation summary_proj_to_labels summary_type "
            "summary_use_proj type_vocab_size"
        ),
        PIPELINE: "prefix task_specific_params",
        FILES: (
            "add_bias_logits layer_norm_elementwise_affine n_ctx pad_vocab_size_multiple "
            "tie_encoder_decoder"
        ),
        NOT_READ: (
            "_sliding_window_pattern bos_token_ids cross_attention_hidden_size decoder_bias "
            "down_scale_factor embedding_size eos_token_ids extra_pos_embeddings gap_size "
            "head_dim hidden_act hidden_activation layer_norm_eps max_position_embeddings "
            "max_window_layers mlp_bias net_structure_type n_special num_hidden_layers "
            "num_memory_blocks output_projection pad_token_ids predict_special_tokens "
            "rope_interleaved rope_theta sliding_window_pattern sliding_window_size use_mrope "
            "vocab_size_or_config_json_file"
        ),
    },
    GENERATION: {
        MEMORY: "attn_implementation dtype return_legacy_cache torch_dtype",
        RECORD: "architectures model_type tokenizer_class trust_remote_code",
        "not read by transformers, but by code of models of their own": (
            "assistant_token_id chat_format max_context_length max_window_size user_token_id"
        ),
    },
    TOKENIZER_CONFIG: {
        RECORD: (
            "__version__ _commit_hash _from_auto _from_pipeline auto_map backend cache_dir device "
            "device_map dtype fast_tokenizer force_download from_slow full_tokenizer_file "
            "init_inputs is_local language local_files_only max_model_input_sizes merges_file "
            "model_type name name_or_path processor_class proxies resume_download revision "
            "source_lang special_tokens special_tokens_map_file spm_file subfolder target_lang "
            "task tokenizer_file tokenizer_name tokenizer_type torch_dtype transformers_version "
            "trust_remote_code unsloth_version use_auth_token use_fast vocab_file"
        ),
        "padding is masked, so answers do not depend on it": (
            "pad_to_max_length pad_to_multiple_of pad_token_type_id padding padding_side"
        ),
        "in the tokenizer that transformers makes, which is kept": (
            "continuing_subword_prefix end_of_word_suffix initial_alphabet tokenizer_padding "
            "tokenizer_truncation unk_id"
        ),
        "read at a call of the tokenizer alone": (
            "is_split_into_words max_length max_seq_length max_source_length padding_strategy "
            "response_schema response_template return_attention_mask return_offsets_mapping "
            "return_special_tokens_mask return_tensors return_token_type_ids stride truncation "
            "truncation_strategy verbose"
        ),
        "not read by the class of the tokenizer in transformers": (
            "add_bos_token add_eos_token add_prefix_space additional_special_tokens "
            "chat_control_tokens chat_template clean_up_tokenization_spaces "
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output "
            "do_basic_tokenize do_lower do_lower_case errors extra_ids fast keep_accents "
            "language_codes legacy legacy_behaviour lowercase model_input_names "
            "model_specific_special_tokens "
            "never_split num_madeup_words offset remove_space separate_vocabs sp_model_kwargs "
            "spaces_between_special_tokens split_by_punct src_lang strip_accents tgt_lang "
            "tokenize_chinese_chars trim_offsets use_default_system_prompt vocab_size vocab_type "
            "wordpieces_prefix"
        ),
    },
    SPECIAL_TOKENS: {
        "not read beside added_tokens_decoder": ANY,
    },
    SENTENCE: {
        RECORD: "__version__ model_type",
        "of comparing vectors, not of computing them": "score_functions similarity_fn_name",
        MEMORY: "keep_in_fp32_modules",
    },
    READING: {
        MEMORY: "backend model_args model_kwargs unpad_inputs",
        RECORD: "model_name_or_path",
        "of queries of multi-vector models": "document_length query_length",
    },
    MODULE: {
        RECORD: "dropout embedding_dimension in_features word_embedding_dimension",
    },
}

NEUTRAL: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    CONFIG: {
        "is_decoder": (False,),
        "is_causal": (True,),
        "add_cross_attention": (False,),
        "attention_bias": (False,),
        "lm_head_bias": (False,),
        "pruned_heads": ({},),
        "use_sliding_window": (False,),
        "full_attn_mod": (1,),
        "interpolate_factor": (1,),
        "position_embedding_type": ("absolute", "sans_pos"),
        "attn_logit_softcapping": (None,),
        "rope_scaling": (None,),
        "query_pre_attn_scalar": (None,),
        "alpha_pattern": ({},),
    },
    # transformers 4 writes it for a tokenizer.model.
    TOKENIZER_CONFIG: {"extra_special_tokens": ({}, []), "split_special_tokens": (False,)},
    READING: {
        "query_expansion": (None,),
        "module_output_name": ("token_embeddings", "scores", "causal_logits"),
        "modality_config": (
            {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
            {"text": {"method": "forward", "method_output_name": "logits"}},
        ),
    },
}


def judge(file: str, settings: Settings) -> list[str]:
    """Returns words on the settings without effect, after all with an effect were read.

    `file` is a key of the tables; a setting that may have an effect is refused.
    """
    reasons = {key: why for why, keys in WITHOUT_EFFECT[file].items() for key in keys.split()}
    if file == CONFIG:
        reasons |= dict.fromkeys(SAME_TOKENS, MEMORY)
        reasons |= dict.fromkeys((*SEARCH_SETTINGS, *TOKENS, OLD), "of generation")
    found: dict[str, list[str]] = {}
    for key, value in settings.unread().items():
        why = reasons.get(key, reasons.get(ANY, ""))
        if value in NEUTRAL.get(file, {}).get(key, ()):
            why = "the value without effect"
        if not why:
            shown = json.dumps(value, ensure_ascii=False, default=str)[:MOST_SHOWN]
            raise InputError(
                f"{settings.path}: expected settings that import knows, found {key} ({shown}), "
                f"which may change answers; if it does not, add --ignore-setting {key}"
            )
        found.setdefault(why, []).append(key)
    return [f"{', '.join(keys)} ({why})" for why, keys in found.items()] + settings.left
