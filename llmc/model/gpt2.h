// GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019), in the names of its files.
#pragma once

#include "llmc/model/config.h"
#include "llmc/model/model.h"

namespace llmc {

Model gpt2(const GPTConfig& config);
inline std::int64_t count_parameters(const GPTConfig& config) { return count_parameters(gpt2(config)); }

}  // namespace llmc
