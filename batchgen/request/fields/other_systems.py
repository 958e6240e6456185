"""Names of options in the APIs of other systems, and what to write here instead: data for hints, notes and a page.

A name that is also a field here needs no entry in `ANSWERS`: the table of fields says what happens with it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Verdict = Literal["use", "refuse", "idle"]
"""use: a field or an option here does the same. refuse: nothing does. idle: it does not change a result."""

_OPENAI_COMPLETIONS = """model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty
    seed stop stream stream_options suffix temperature top_p user"""
_OPENAI_CHAT = """messages model audio frequency_penalty function_call functions logit_bias logprobs
    max_completion_tokens max_tokens metadata modalities moderation n parallel_tool_calls prediction presence_penalty
    prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed
    service_tier stop store stream stream_options temperature tool_choice tools top_logprobs top_p user verbosity
    web_search_options"""


def words(text: str) -> tuple[str, ...]:
    """The words of a text, without repetitions."""
    return tuple(dict.fromkeys(text.split()))


NAMES: dict[str, tuple[str, ...]] = {
    system: words(text)
    for system, text in {
        "OpenAI": f"""{_OPENAI_COMPLETIONS} {_OPENAI_CHAT} background background_options context_management
            conversation include input instructions max_output_tokens max_tool_calls previous_response_id reasoning
            truncation image timeout extra_headers extra_query extra_body""",
        "vLLM": """n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed
            stop stop_token_ids ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids
            prompt_logprob_start logprob_token_ids flat_logprobs detokenize skip_special_tokens
            spaces_between_special_tokens include_stop_str_in_output output_kind stream_interval skip_clone
            structured_outputs guided_decoding logit_bias logits_processors allowed_token_ids extra_args bad_words
            skip_reading_prefix_cache thinking_token_budget repetition_detection routed_experts_prompt_start
            trace_decode_token_ids truncate_prompt_tokens truncation_side use_beam_search beam_width length_penalty
            early_stopping watermarking add_special_tokens documents chat_template chat_template_kwargs
            media_io_kwargs mm_processor_kwargs priority request_id session_id return_tokens_as_token_ids
            return_token_ids return_token_offsets return_prompt_text return_mm_kwargs cache_salt kv_transfer_params
            ec_transfer_params vllm_xargs add_generation_prompt continue_final_message echo include_reasoning
            reasoning_effort prompt_embeds prompt_token_ids multi_modal_data guided_json guided_regex guided_choice
            guided_grammar guided_json_object guided_decoding_backend guided_whitespace_pattern structural_tag
            response_format lora_request messages tools tool_choice parallel_tool_calls json regex choice grammar
            json_object disable_any_whitespace disable_additional_properties whitespace_pattern""",
        "SGLang": """text input_ids input_embeds image_data video_data audio_data sampling_params rid max_new_tokens
            min_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty
            presence_penalty repetition_penalty n json_schema regex ebnf structural_tag ignore_eos
            skip_special_tokens spaces_between_special_tokens no_stop_trim custom_params stream_interval logit_bias
            sampling_seed dtype return_logprob logprob_start_len top_logprobs_num token_ids_logprob
            return_sampling_mask return_text_in_logprobs return_flat_raw_top_logprobs
            return_flat_raw_top_logprobs_b64 stream log_metrics return_hidden_states return_routed_experts
            routed_experts_start_len return_indexer_topk modalities session_id session_params lora_path lora_id
            custom_logit_processor positional_embed_overrides mm_hashes mm_content_hashes use_audio_in_video
            video_config bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size
            routed_dp_rank data_parallel_rank disagg_prefill_dp_rank kv_router_hint routing_key conversation_id
            http_worker_ipc background require_reasoning max_thinking_tokens priority extra_key no_logs custom_labels
            return_bytes return_entropy return_prompt_token_ids external_trace_header received_time
            need_wait_for_mm_inputs num_items_assigned encoder_urls max_dynamic_patch min_dynamic_patch
            image_max_dynamic_patch video_max_dynamic_patch images_config multi_item_delimiter_indices cache_salt
            return_cached_tokens_details return_token_ids return_meta_info ngram_corpus_id task separate_reasoning
            stream_reasoning reasoning_effort reasoning chat_template_kwargs continue_final_message min_tokens""",
        "Hugging Face": """max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings
            do_sample num_beams use_mtp use_cache cache_implementation cache_config max_cache_len temperature top_k
            top_p min_p top_h typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty
            length_penalty no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id
            forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
            begin_suppress_tokens sequence_bias token_healing guidance_scale watermarking_config num_return_sequences
            output_attentions output_hidden_states output_scores output_logits return_dict_in_generate pad_token_id
            bos_token_id eos_token_id encoder_no_repeat_ngram_size decoder_start_token_id is_assistant
            num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold
            prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit assistant_lookbehind
            target_lookbehind assistant_ensemble_weight speculation_type compile_config disable_compile
            continuous_batching_config low_memory penalty_alpha dola_layers diversity_penalty num_beam_groups
            constraints force_words_ids prefill_chunk_size inputs_embeds attention_mask logits_processor
            stopping_criteria prefix_allowed_tokens_fn assistant_model streamer synced_gpus negative_prompt_ids
            custom_generate return_full_text clean_up_tokenization_spaces handle_long_generation prefix
            generation_config generate_kwargs""",
        "TGI": """inputs parameters do_sample max_new_tokens repetition_penalty frequency_penalty return_full_text
            stop stop_sequences seed temperature top_k top_p truncate typical_p best_of watermark details
            decoder_input_details top_n_tokens grammar adapter_id stream tool_prompt guideline""",
        "lm-eval": """until do_sample max_gen_toks temperature top_p top_k max_tokens max_new_tokens max_length stop
            seed num_beams repetition_penalty min_p gen_kwargs generation_kwargs think_end_token enable_thinking""",
        "llama.cpp": """prompt temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent
            n_keep n_cmpl n_cache_reuse stream stop typical_p repeat_penalty repeat_last_n presence_penalty
            frequency_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
            xtc_probability xtc_threshold top_n_sigma mirostat mirostat_tau mirostat_eta penalize_nl grammar json_schema
            seed ignore_eos logit_bias n_probs min_keep t_max_predict_ms id_slot cache_prompt return_tokens samplers
            timings_per_token return_progress sse_ping_interval post_sampling_probs response_fields lora input_prefix
            input_suffix input_extra n_ctx reasoning_format thinking_forced_open parse_tool_calls
            thinking_budget_tokens chat_template_kwargs response_format""",
        "Ollama": """model prompt messages suffix images format system template stream raw keep_alive context options
            think logprobs top_logprobs tools seed num_predict top_k top_p min_p typical_p repeat_last_n temperature
            repeat_penalty presence_penalty frequency_penalty mirostat mirostat_tau mirostat_eta penalize_newline
            stop num_keep tfs_z numa num_ctx num_batch num_gpu main_gpu low_vram vocab_only use_mmap use_mlock
            num_thread f16_kv logits_all truncate shift""",
        "Anthropic": """model messages max_tokens max_tokens_to_sample stop_sequences system temperature top_k top_p
            stream thinking tools tool_choice metadata service_tier container context_management mcp_servers
            output_config output_format cache_control inference_geo""",
        "Gemini": """contents generationConfig systemInstruction safetySettings toolConfig cachedContent temperature
            topP topK candidateCount maxOutputTokens stopSequences presencePenalty frequencyPenalty seed
            responseMimeType responseSchema responseJsonSchema responseLogprobs logprobs responseModalities
            speechConfig mediaResolution thinkingConfig imageConfig audioTimestamp routingConfig modelSelectionConfig
            enableEnhancedCivicAnswers enableAffectiveDialog audioTranscriptionConfig translationConfig
            max_output_tokens stop_sequences candidate_count response_mime_type response_schema system_instruction
            thinking_config safety_settings""",
        "Bedrock": """inferenceConfig maxTokens temperature topP topK stopSequences additionalModelRequestFields
            guardrailConfig toolConfig performanceConfig promptVariables requestMetadata outputConfig inputText
            textGenerationConfig maxTokenCount max_gen_len anthropic_version anthropic_beta""",
        "LiteLLM": """timeout request_timeout stream_timeout extra_headers extra_query extra_body headers drop_params
            additional_drop_params allowed_openai_params num_retries max_retries fallbacks
            context_window_fallback_dict api_base base_url api_key api_version api_type organization
            custom_llm_provider mock_response caching cache deployment_id model_list input_cost_per_token
            output_cost_per_token enable_json_schema_validation reasoning_effort thinking maxTokens topP topK
            stop_sequences""",
        "Cohere": """k p max_tokens num_generations stop_sequences preamble chat_history connectors documents
            return_likelihoods prompt_truncation safety_mode strict_tools raw_prompting""",
        "Mistral": "random_seed safe_prompt prompt_mode",
        "Together": "safety_model repetition_penalty context_length_exceeded_behavior",
        "Fireworks": """context_length_exceeded_behavior prompt_truncate_len prompt_cache_max_len
            perf_metrics_in_response raw_output speculation mirostat_target mirostat_lr ignore_eos""",
        "OpenRouter": "top_a include_reasoning reasoning transforms plugins provider",
        "TensorRT-LLM": """text_input max_tokens bad_words stop_words end_id pad_id beam_width random_seed
            len_penalty return_log_probs return_context_logits return_generation_logits""",
    }.items()
}
"""System -> every name of an option or prompt that its API reads, those of its sampling parameters included."""

_USE = {
    "`max_new_tokens`": """max_gen_toks num_predict n_predict max_output_tokens max_tokens_to_sample max_token_count
        max_gen_len request_output_len""",
    "`max_new_tokens`, which does not count the prompt": "max_length",
    "`min_new_tokens`, which does not count the prompt": "min_length",
    "`stop`": """until stop_sequences stop_strings stop_words stop_word stop_strs stopping_criteria stop_sequence
        stopping_strings custom_stopping_strings stop_str stop_words_list""",
    "`ignore_eos: true`": "ban_eos_token",
    "`stop_token_ids`": "eos_token_id end_id stop_tokens stop_ids",
    "`no_stop_trim: true`": "include_stop_str_in_output",
    "`temperature: 0` for false; true needs nothing": "do_sample",
    "`tool_choice`": "tool_config",
    "`thinking_budget`": "max_thinking_tokens thinking_budget_tokens reasoning_budget",
    "`separate_reasoning`": "include_reasoning reasoning_format",
    "`seed`": "sampling_seed random_seed sampler_seed",
    "`n`": "num_return_sequences candidate_count num_generations n_cmpl num_samples n_samples",
    "`top_k`": "k runtime_top_k",
    "`top_p`": "p runtime_top_p",
    "`repetition_penalty`": "repeat_penalty penalty_repeat rep_pen",
    "`return_logprob: true` with `logprob_start_len: 0`": """prompt_logprobs decoder_input_details
        return_context_logits""",
    "`logprob_start_len`": "prompt_logprob_start",
    "`return_logprob: true` with `token_ids_logprob`": "logprob_token_ids prompt_logprob_token_ids",
    "`return_logprob: true` with `top_logprobs_num`": "n_probs top_n_tokens",
    "`return_logprob: true`": """response_logprobs output_scores output_logits return_likelihoods return_log_probs
        return_generation_logits""",
    "--logprobs-mode processed, for the whole run": "post_sampling_probs",
    "`return_hidden_states: true`": "output_hidden_states",
    "`json_schema`": "response_schema response_json_schema json",
    '`json_schema: {"type": "object"}`': "json_object",
    "`response_format` or `json_schema`": "response_mime_type output_format output_config format",
    "`regex`": "dtype",
    "`ebnf`": "grammar grammar_string",
    "`json_schema`, `regex`, `choice`, `ebnf` or `structural_tag`": "constraints",
    "`bad_words`, which takes lists of ids too": """bad_words_ids bad_words_list banned_strings banned_tokens
        custom_token_bans""",
    "`logit_bias`": "sequence_bias",
    "`allowed_token_ids`": "prefix_allowed_tokens_fn",
    "`input_ids`; in a /v1/completions body `prompt`": "prompt_token_ids",
    "`input_ids`, which are taken as they are; `text` gets the tokenizer's BOS": "add_special_tokens add_bos_token",
    "`input_embeds`": "prompt_embeds inputs_embeds",
    "`image_data` or `audio_data`": "multi_modal_data images image input_extra",
    "`text`": "inputs text_input input_text input",
    "`messages`": "contents chat_history",
    "a message of the role system in `messages`, or --system for the whole run": """system system_prompt
        system_message system_instruction instructions preamble""",
    "`echo: true`": "return_full_text",
    "`text` and `suffix`": "input_prefix input_suffix",
    "`chat_template_kwargs`, with the names that the model's template reads": """documents enable_thinking thinking
        think reasoning reasoning_effort thinking_config thinking_forced_open verbosity guideline tool_prompt
        chat_template_args require_reasoning prompt_mode""",
    "`tools`": "functions",
    "`lora_path`, with the name of a --lora adapter": "adapter_id lora lora_request lora_name lora_id",
    "`custom_logit_processor`, with the name of a --logit-processor": "logits_processors logits_processor",
    "`custom_params` with `custom_logit_processor`": "extra_args vllm_xargs",
    "`completion`, to score given tokens": "trace_decode_token_ids",
    "--stop-on-repeat, for the whole run": "repetition_detection",
    "--truncate left or right, for the whole run": """truncate_prompt_tokens truncation_side truncation truncate
        prompt_truncate_len prompt_truncation context_length_exceeded_behavior handle_long_generation transforms""",
    "--max-model-len, for the whole run": "num_ctx n_ctx",
    "--max-time, for the whole run": "max_time t_max_predict_ms",
    "--include-prompt": "return_prompt_text",
    "--include-prompt-ids": "return_prompt_token_ids",
    "--tokenizer FOLDER, whose template is used for the whole run": "chat_template template",
    "--events, and `stream: true`": "streamer",
    "`messages` with the whole conversation": """session_params previous_response_id conversation context
        cached_content context_management""",
    "`sampling_params`": """sampling_parameters generation_kwargs generate_kwargs gen_kwargs generation_config
        generation_params extra_body parameters options inference_config text_generation_config
        additional_model_request_fields model_kwargs inference_params""",
}
_REFUSE = {
    "there is no beam search; `best_of` keeps the likeliest samples": """num_beams use_beam_search beam_width
        length_penalty len_penalty early_stopping num_beam_groups diversity_penalty force_words_ids""",
    "there is no such sampler; use `top_p`, `top_k` or `min_p`": """typical_p top_a top_h top_n_sigma tfs_z mirostat
        mirostat_tau mirostat_eta mirostat_target mirostat_lr dynatemp_range dynatemp_exponent dry_multiplier
        dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold eta_cutoff
        epsilon_cutoff samplers min_keep min_tokens_to_keep penalty_alpha mirostat_mode tfs top_p_decay top_p_min
        top_p_reset_ids smoothing_factor smoothing_curve dynamic_temperature dynatemp_low dynatemp_high
        temperature_last sampler_order sampler_priority""",
    "there is no such penalty; use `repetition_penalty` or `frequency_penalty`": """no_repeat_ngram_size
        repeat_last_n encoder_repetition_penalty encoder_no_repeat_ngram_size exponential_decay_length_penalty
        penalize_newline penalize_nl rep_pen_range repetition_penalty_range""",
    "there is no second forward pass; remove it": "guidance_scale negative_prompt negative_prompt_ids dola_layers",
    "results get no watermark; remove it": "watermark watermarking watermarking_config",
    "no token is forced; use a constraint such as `regex`": """forced_bos_token_id forced_eos_token_id
        decoder_start_token_id n_indent token_healing""",
    "generation code is not loaded from rows; use `custom_logit_processor`": "custom_generate",
    "calls are required by `tool_choice`, and arguments then satisfy their schema": """function_call max_tool_calls
        strict_tools""",
    "the markers are the model's, see --reasoning; remove it": "think_end_token stream_reasoning",
    "white space and keys follow the schema; use `regex` or `ebnf` for another layout": """guided_whitespace_pattern
        whitespace_pattern disable_any_whitespace disable_additional_properties""",
    "it is not written; remove it": """include response_fields output_attentions return_sampling_mask return_entropy
        return_indexer_topk return_token_offsets return_bytes""",
    "all positions are written; remove it": "routed_experts_start_len routed_experts_prompt_start",
    "a text ends where the context ends; use `max_new_tokens`": "n_keep num_keep shift",
    "only text, images and audio are input; remove it": """video_data video_config use_audio_in_video modalities
        audio response_modalities speech_config audio_timestamp image_config audio_transcription_config
        translation_config prediction""",
    "embeddings are given for the whole prompt; use `input_embeds`": "positional_embed_overrides",
    "there is no such template; write it into the prompt": "task prefix safe_prompt raw_prompting prompt_variables",
    "nothing outside the run is reached; remove it": """web_search_options mcp_servers connectors plugins moderation
        safety_settings safety_mode safety_model guardrail_config container""",
    "one prompt is one row; use `completions` to score several texts": "multi_item_delimiter_indices",
}
_IDLE = {
    "results hold the token ids anyway; leave it out": """return_tokens_as_token_ids return_token_ids return_tokens
        return_dict_in_generate details return_meta_info flat_logprobs return_flat_raw_top_logprobs
        return_flat_raw_top_logprobs_b64""",
    "text is decoded anyway; leave it out": """detokenize output_kind stream_interval
        clean_up_tokenization_spaces parse_tool_calls raw_output""",
    "it does not change a result; leave it out": """priority request_id session_id conversation_id background
        background_options timeout request_timeout stream_timeout extra_headers extra_query headers drop_params
        additional_drop_params allowed_openai_params num_retries max_retries fallbacks context_window_fallback_dict
        api_base base_url api_key api_version api_type organization custom_llm_provider mock_response deployment_id
        model_list input_cost_per_token output_cost_per_token enable_json_schema_validation anthropic_version
        anthropic_beta performance_config request_metadata routing_config model_selection_config provider
        inference_geo enable_enhanced_civic_answers enable_affective_dialog keep_alive custom_labels no_logs
        log_metrics external_trace_header received_time http_worker_ipc stream_options store service_tier user
        metadata safety_identifier raw""",
    "shared prefixes are computed once anyway; leave it out": """cache_salt extra_key cache_control caching cache
        cache_prompt n_cache_reuse use_cache cache_implementation cache_config max_cache_len
        skip_reading_prefix_cache prompt_cache_key prompt_cache_options prompt_cache_retention prompt_cache_max_len
        return_cached_tokens_details""",
    "a report has the timings; leave it out": """timings_per_token return_progress sse_ping_interval
        perf_metrics_in_response""",
    "the engine plans this for the whole run; leave it out": """kv_transfer_params ec_transfer_params bootstrap_host
        bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank data_parallel_rank
        disagg_prefill_dp_rank kv_router_hint routing_key id_slot numa num_batch num_gpu main_gpu low_vram vocab_only
        use_mmap use_mlock num_thread f16_kv logits_all compile_config disable_compile continuous_batching_config
        low_memory prefill_chunk_size synced_gpus skip_clone guided_decoding_backend mm_hashes mm_content_hashes
        need_wait_for_mm_inputs num_items_assigned encoder_urls""",
    "there is no draft model, and results do not depend on one; leave it out": """use_mtp is_assistant
        num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold prompt_lookup_num_tokens
        max_matching_ngram_size assistant_early_exit assistant_lookbehind target_lookbehind assistant_ensemble_weight
        speculation_type assistant_model speculation ngram_corpus_id lookahead_config""",
    "each prompt has its own length, nothing is padded; leave it out": """pad_token_id pad_id bos_token_id
        attention_mask remove_invalid_values renormalize_logits""",
    "media are not resized by rows; leave it out": """media_io_kwargs mm_processor_kwargs return_mm_kwargs
        media_resolution max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch
        images_config""",
}

CONTAINERS = frozenset(_USE["`sampling_params`"].split()) | {"params", "config", "settings", "kwargs", "arguments"}
"""Keys whose value, if it is an object, may hold options."""

ORDINARY = frozenset(
    words(
        """audio background cache caching choices completed connectors constraints container contents context
        conversation details documents dtype format functions grammar guideline image include input input_text
        inputs instructions json k modalities moderation n_tokens num_tokens p plugins prediction prefix
        provider raw reasoning regexes shift speculation store task template text_input think thinking
        transforms truncate truncation verbosity"""
    )
)
"""Names that columns of ordinary tables have, too: at the top level of a row they mean nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What to do here instead of an option of another system."""

    verdict: Verdict
    text: str
    """For `use` what to use, else the reason with its remedy. Fields are in backticks, options begin with --."""

    @property
    def advice(self) -> str:
        """The text as part of a sentence."""
        return f"use {self.text}" if self.verdict == "use" else self.text


_TABLES: tuple[tuple[Verdict, dict[str, str]], ...] = (("use", _USE), ("refuse", _REFUSE), ("idle", _IDLE))
ANSWERS: dict[str, Answer] = {
    name: Answer(verdict, text) for verdict, table in _TABLES for text, names in table.items() for name in names.split()
}
"""Name, in snake case, -> its answer."""


_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def snake_case(name: str) -> str:
    """A name as it would be written here: `maxTokens` and `max-tokens` are `max_tokens`."""
    return _HUMP.sub("_", name).replace("-", "_").lower()


@lru_cache(maxsize=1024)
def systems_of(name: str) -> list[str]:
    """The systems whose API has this name, given in snake case."""
    return [system for system, names in NAMES.items() if name in map(snake_case, names)]


_LONG = 8
FOREIGN = frozenset(
    name
    for name, answer in ANSWERS.items()
    if len(name) > _LONG and "_" in name and answer.verdict != "idle" and name not in ORDINARY
)
"""Options of other systems that a key may be a misspelling of: no short name or single word, close to many columns."""


def answer_to(name: str) -> str:
    """What an option of another system is here, as part of a sentence."""
    answer, systems = ANSWERS[name], systems_of(name)
    whose = " and ".join(systems[:2]) or "other systems"
    return f"an option of {whose}: {answer.advice}"


def meaning_of(key: str, known: Collection[str]) -> str | None:
    """What an unknown key means that is a name of `known` in another spelling, or an option of another system."""
    name = snake_case(key[:80])
    if name in known:
        return f"did you mean `{name}`?"
    return answer_to(name) if name in ANSWERS else None


def close_meaning(key: str, known: Collection[str]) -> str | None:
    """What an unknown key means that is a misspelt name of `known`, or option of another system."""
    found = difflib.get_close_matches(key[:80], [*known, *FOREIGN.difference(known)], n=1, cutoff=0.7)
    return asked(found[0], known) if found else None


def asked(name: str, known: Collection[str]) -> str:
    """The question whether `name` is meant: one of `known`, or else an option of another system."""
    return f"did you mean `{name}`?" if name in known else f"did you mean `{name}`, {answer_to(name)}"
