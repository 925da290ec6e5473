// Made by dev/data/make_chat_formats.py of the templates of SmolLM2, Llama 3, 3.1 and 3.2, and Qwen 2.5.
#include "llmc/data/chat_format.h"

namespace llmc {

std::span<const char* const> known_chat_formats() {
    // clang-format off
    static constexpr const char* formats[] = {
        // smollm2
        R"({"template": "99ab995e9629dacd", "begin": "", "system": ["<|im_start|>system\n", "<|im_end|>\n"], "u)"
        R"(ser": ["<|im_start|>user\n", "<|im_end|>\n"], "assistant": ["<|im_start|>assistant\n", "<|im_end|>\n)"
        R"("], "generation": "<|im_start|>assistant\n", "default_system": "<|im_start|>system\nYou are a helpfu)"
        R"(l AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n", "trims": false, "date": null})",
        // llama3
        R"({"template": "9799ad6e2dea0594", "begin": "<|begin_of_text|>", "system": ["<|start_header_id|>system)"
        R"(<|end_header_id|>\n\n", "<|eot_id|>"], "user": ["<|start_header_id|>user<|end_header_id|>\n\n", "<|e)"
        R"(ot_id|>"], "assistant": ["<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"], "genera)"
        R"(tion": "<|start_header_id|>assistant<|end_header_id|>\n\n", "default_system": null, "trims": true, ")"
        R"(date": null})",
        // llama3_1
        R"({"template": "6ca7779b7730196a", "begin": "<|begin_of_text|>", "system": ["<|start_header_id|>system)"
        R"(<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n", "<|eot_id|)"
        R"(>"], "user": ["<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"], "assistant": ["<|start_)"
        R"(header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"], "generation": "<|start_header_id|>assista)"
        R"(nt<|end_header_id|>\n\n", "default_system": "<|start_header_id|>system<|end_header_id|>\n\nCutting K)"
        R"(nowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>", "trims": true, "date": null})",
        // llama3_2
        R"({"template": "c3d57e38f5ff0756", "begin": "<|begin_of_text|>", "system": ["<|start_header_id|>system)"
        R"(<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n", "<|eot_id|)"
        R"(>"], "user": ["<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"], "assistant": ["<|start_)"
        R"(header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"], "generation": "<|start_header_id|>assista)"
        R"(nt<|end_header_id|>\n\n", "default_system": "<|start_header_id|>system<|end_header_id|>\n\nCutting K)"
        R"(nowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>", "trims": true, "date": "2024-0)"
        R"(7-26"})",
        // qwen2_5
        R"({"template": "2469c9508f79506e", "begin": "", "system": ["<|im_start|>system\n", "<|im_end|>\n"], "u)"
        R"(ser": ["<|im_start|>user\n", "<|im_end|>\n"], "assistant": ["<|im_start|>assistant\n", "<|im_end|>\n)"
        R"("], "generation": "<|im_start|>assistant\n", "default_system": "<|im_start|>system\nYou are Qwen, cr)"
        R"(eated by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n", "trims": false, "date": null})",
    };
    // clang-format on
    return formats;
}

}  // namespace llmc
