// The options of low-rank adapters (model/low_rank.h): what they mean together, and what they take from the folder of
// --lora or from a checkpoint. Errors are UserErrors.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "llmc/io/checkpoint.h"
#include "llmc/model/model.h"
#include "llmc/train/options.h"
#include "llmc/train/sources.h"

namespace llmc {

// Gives --lora-layers one spelling, and refuses matrices that no layer has.
void resolve_adapters(Options& options);
void check_adapters(const Options& options);
// The model with its adapters and with its base in --base-dtype, if it has any.
Model adapted(Model model, const Options& options);

// Takes the settings of the adapter of --lora, and its base.
void take_adapter(Options& options, const Sources& sources);
// Takes the adapters of a checkpoint that has some, for generation.
void take_adapters(Options& options, const Sources& sources);
// A checkpoint's adapters go on beside the weights beside which they were trained. `then` is its configuration.
void take_base(Options& options, const Sources& sources, const nlohmann::ordered_json& then);
// `now` is this run's configuration.
void require_same_adapters(const CheckpointInfo& checkpoint, const Options& options,
                           const nlohmann::ordered_json& then, const nlohmann::ordered_json& now);

// The adapter_config.json that --export writes.
std::string exported_adapter_config(const Options& options);

}  // namespace llmc
