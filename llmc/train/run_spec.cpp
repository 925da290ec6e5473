#include "llmc/train/run_spec.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

namespace llmc {

RunSpec run_spec(const Options& options, const Mesh& mesh, const DeviceSizes& sizes) {
    const ModelChoices named = choices_of(options.model), choices = options.choices_of_model();
    const bool has_own_sizes =
        std::ranges::any_of(family_of(options.model).options, [&](const FamilyOption& option) {
            return option.is_size() && choices.size(option.name) != named.size(option.name);
        });
    Model model = options.make_model();
    // Nobody can give other sizes of a folder's weights, so they are not to blame for too large a model.
    if (options.folder) {
        std::erase_if(model.sizes, [&](const ModelSize& size) {
            return size.option != "seq-len" && !options.is_given(size.option);
        });
    }
    return {.model = std::move(model),
            .model_name = has_own_sizes ? "" : options.model,
            .dtype = options.compute_dtype(),
            .gradient_dtype = options.kept_gradient_dtype(),
            .moments_dtype = options.kept_moments_dtype(),
            .optimizer = options.optimizer_used().kind,
            .has_master = options.master_dtype != "none",
            .fp8 = options.fp8_scaling(),
            .fp8_dtype = sizes.fp8_dtype(),
            .mesh = mesh,
            .default_reduction = !options.is_given("reduce-every"),
            .pipeline_schedule = options.kind_of_pipeline_schedule(),
            .virtual_stages = options.chunks_of_stage(),
            .pipeline_layers = options.pipeline_layers,
            .recompute = options.recomputation(),
            .trains = !options.generate,
            .copies_checkpoints = options.copies_checkpoints(),
            .global_batch_tokens = *options.global_batch_tokens,
            .micro_batch_sequences = options.micro_batch_size.value_or(0),
            .default_micro_batch_tokens = sizes.default_micro_batch_tokens(),
            // Generation needs the logits of one row only.
            .logits_bytes = options.generate ? 0 : sizes.default_logits_bytes()};
}

}  // namespace llmc
