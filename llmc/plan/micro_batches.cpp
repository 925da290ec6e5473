#include "llmc/plan/micro_batches.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

#include "llmc/core/error.h"

namespace llmc {

namespace {

// Larger values are typing errors. The limits keep sizes within 64 bits and a step's list of actions small.
constexpr std::int64_t largest_micro_batch = 1 << 14;
constexpr std::int64_t most_block_passes = 1 << 18,  // micro-batches times layers
    most_layers = 1 << 11;  // a plan lists what each does, and takes a second for the most

// The positive multiple nearest to `value`, rounded down if there is one.
std::int64_t multiple_near(std::int64_t value, std::int64_t multiple) {
    return std::max<std::int64_t>(1, value / multiple) * multiple;
}
// The positive multiples nearest to `value`, as "1024 or 1536".
std::string multiples_near(std::int64_t value, std::int64_t multiple) {
    const std::int64_t below = value / multiple * multiple;
    return below == 0 ? std::to_string(multiple) : fmt::format("{} or {}", below, below + multiple);
}

}  // namespace

void check_global_batch(const RunSpec& spec) {
    const std::int64_t T = spec.model.sequence_length, ranks = spec.mesh.data_ranks();
    if (spec.global_batch_tokens < 1 || spec.global_batch_tokens > std::int64_t{1} << 40) {
        user_error("--global-batch-tokens {} is out of range; give {} to {}", spec.global_batch_tokens,
                   T * ranks, std::int64_t{1} << 40);
    }
    if (spec.global_batch_tokens % (T * ranks) != 0) {
        refuse({"data-parallel ranks divide the sequences of the global batch", spec.global_batch_tokens / T,
                ranks,
                fmt::format("--global-batch-tokens {}", multiple_near(spec.global_batch_tokens, T * ranks))},
               "--global-batch-tokens {} is not a multiple of {} ({} tokens per sequence x {} data-parallel "
               "process{}); try {}",
               spec.global_batch_tokens, T * ranks, T, ranks, ranks == 1 ? "" : "es",
               multiples_near(spec.global_batch_tokens, T * ranks));
    }
}

std::int64_t largest_divisor(std::int64_t n, std::int64_t limit) {
    for (std::int64_t d = std::min(n, limit); d > 1; --d) {
        if (n % d == 0) return d;
    }
    return 1;
}

std::int64_t best_micro_batch(const RunSpec& spec, std::int64_t limit) {
    const std::int64_t sequences = spec.rank_sequences(), stages = spec.mesh.pipeline;
    return largest_divisor(sequences % stages == 0 ? sequences / stages : sequences, limit);
}

void check_groups(const RunSpec& spec, std::int64_t micro_batch) {
    const std::int64_t sequences = spec.rank_sequences(), stages = spec.mesh.pipeline;
    if (spec.pipeline_schedule != PipelineSchedule::interleaved || sequences / micro_batch % stages == 0)
        return;
    const Rule rule{"the stages of an interleaved schedule divide the micro-batches", sequences / micro_batch,
                    stages, ""};
    const auto refuse_number = [&](const std::string& change, const std::string& why,
                                   const std::string& advice) {
        refuse(
            {rule.rule, rule.value, rule.limit, change},
            "--pipeline-schedule interleaved needs a multiple of --pipeline-parallel {} micro-batches, but "
            "{}; try {}, or --pipeline-schedule 1f1b --virtual-stages 1",
            stages, why, advice);
    };
    if (sequences % stages == 0) {
        const std::string change = fmt::format("--micro-batch-size {}", best_micro_batch(spec, micro_batch));
        refuse_number(
            change,
            fmt::format("--micro-batch-size {} makes {} per step", micro_batch, sequences / micro_batch),
            change);
    }
    const std::int64_t group = spec.model.sequence_length * spec.mesh.data_ranks() * stages;
    refuse_number(fmt::format("--global-batch-tokens {}", multiple_near(spec.global_batch_tokens, group)),
                  fmt::format("--global-batch-tokens {} makes at most {} per step", spec.global_batch_tokens,
                              sequences),
                  fmt::format("--global-batch-tokens {}", multiples_near(spec.global_batch_tokens, group)));
}

std::int64_t choose_micro_batch(const RunSpec& spec) {
    const std::int64_t sequences = spec.rank_sequences(), given = spec.micro_batch_sequences;
    if (given > largest_micro_batch) {
        user_error("--micro-batch-size {} is out of range; give 1 to {}", given, largest_micro_batch);
    }
    if (given == 0) {
        return best_micro_batch(
            spec, std::max<std::int64_t>(1, spec.default_micro_batch_tokens / spec.model.sequence_length));
    }
    if (sequences % given != 0) {
        refuse(
            {"the micro-batch divides the sequences of a rank", given, sequences,
             fmt::format("--micro-batch-size {}", largest_divisor(sequences, given))},
            "--micro-batch-size {} does not divide the {} sequence{} of each process (--global-batch-tokens "
            "{}); try --micro-batch-size {}",
            given, sequences, sequences == 1 ? "" : "s", spec.global_batch_tokens,
            largest_divisor(sequences, given));
    }
    return given;
}

std::int64_t most_micro_batches(const RunSpec& spec) { return most_micro_batches(spec.model.layers()); }

std::int64_t most_micro_batches(std::int64_t layers) {
    return layers > most_layers ? 0 : most_block_passes / std::max<std::int64_t>(1, layers);
}

void check_layers(const RunSpec& spec, std::int64_t micro_batches) {
    const std::int64_t layers = spec.model.layers();
    if (layers > most_layers)
        refuse({"layers", layers, most_layers, fmt::format("--layers {}", most_layers)},
               "--layers {} is out of range; give 1 to {}", layers, most_layers);
    if (micro_batches > most_micro_batches(spec))
        refuse({"passes of a step", saturated_product(spec.model.layers(), micro_batches), most_block_passes,
                fmt::format("--layers {}", most_block_passes / micro_batches)},
               "--layers {} is out of range; give 1 to {}", spec.model.layers(),
               most_block_passes / micro_batches);
}

namespace {

// The smallest micro-batch that makes no more micro-batches than a step may have.
std::int64_t smallest_micro_batch(const RunSpec& spec) {
    const std::int64_t sequences = spec.rank_sequences();
    for (std::int64_t size = 1; size < sequences; ++size) {
        if (sequences % size == 0 && sequences / size <= most_micro_batches(spec)) return size;
    }
    return sequences;
}

}  // namespace

void check_micro_batches(const RunSpec& spec, std::int64_t micro_batch) {
    const std::int64_t most = most_micro_batches(spec), micro_batches = spec.rank_sequences() / micro_batch;
    check_layers(spec, 1);
    if (micro_batches > most) {
        refuse({"passes of a step", saturated_product(spec.model.layers(), micro_batches), most_block_passes,
                fmt::format("--micro-batch-size {}", smallest_micro_batch(spec))},
               "--global-batch-tokens {} makes {} micro-batches per step, but {} is the most for {} layers; "
               "try a larger --micro-batch-size, more processes or fewer tokens",
               spec.global_batch_tokens, micro_batches, most, spec.model.layers());
    }
}

}  // namespace llmc
