// Every way to shard a step. The list is sound, it sends the bytes and takes the memory of the
// formulas in docs/parallelism.md, and planted faults are found.
#include "llmc/parallel/zero/sharding.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/memory_layout.h"
#include "llmc/model/units.h"
#include "llmc/parallel/step/build_step.h"
#include "llmc/parallel/zero/store_layout.h"
#include "test/gpt2_units.h"
#include "test/unit/planted_step_fault.h"
#include "test/unit/step_specs.h"

namespace llmc {
namespace {

constexpr int layers = 5;

std::string text_of(const StepSpec& spec) {
    const Sharding& s = spec.sharding;
    return fmt::format(
        "stage {}, {} x {}, each {}, {} micro-batches, rounds {}, prefetch {}, reshards {}, state on {}, "
        "parameters on "
        "{}, own memory {}",
        s.stage, s.replicas, s.shards, s.reduces_each_micro_batch, spec.pipeline.micro_batches,
        spec.rounds_gradients, s.prefetch_units, s.reshards_after_forward, name_of(s.offload.state),
        name_of(s.offload.parameters), s.offload.has_own_memory);
}

// Calls f with every combination without offload, or with parameters on the CPU device's disk.
void for_all(const std::function<void(const StepSpec&)>& f) {
    constexpr Offload on_disk{.parameters = Tier::disk};
    for (int stage = 0; stage <= 3; ++stage)
        for (const int replicas : {1, 2, 3})
            for (const int micro_batches : {1, 2, 3})
                for (const bool each : {false, true})
                    for (const bool rounds : {false, true})
                        for (const int prefetch : {0, 1, 2, 7})
                            for (const auto& [reshards, offload] :
                                 {std::pair(true, Offload{}), std::pair(false, Offload{}),
                                  std::pair(true, on_disk)}) {
                                if (stage == 0 && replicas > 1) continue;
                                if (stage < 3 && !offload.has_parameters() && (prefetch != 1 || !reshards))
                                    continue;
                                f(whole_spec(layers,
                                             {.stage = stage,
                                              .shards = 4,
                                              .replicas = replicas,
                                              .reduces_each_micro_batch = each,
                                              .prefetch_units = prefetch,
                                              .reshards_after_forward = reshards,
                                              .offload = offload},
                                             micro_batches, rounds));
                            }
}

// Calls f with what may be offloaded from a device with memory of its own.
void for_all_with_own_memory(const std::function<void(const StepSpec&)>& f) {
    for (const Tier state : {Tier::device, Tier::host, Tier::disk})
        for (const Tier parameters : {Tier::device, Tier::host, Tier::disk})
            for (int stage = 0; stage <= 3; ++stage)
                for (const auto& [shards, replicas] : {std::pair(1, 1), std::pair(4, 1), std::pair(2, 2)})
                    for (const int micro_batches : {1, 3})
                        for (const bool each : {false, true})
                            for (const bool rounds : {false, true})
                                for (const int prefetch : {0, 2, 3}) {
                                    if (stage == 0 && replicas > 1) continue;
                                    if (stage > 0 && shards == 1) continue;
                                    StepSpec spec = whole_spec(layers,
                                                               {.stage = stage,
                                                                .shards = shards,
                                                                .replicas = replicas,
                                                                .reduces_each_micro_batch = each,
                                                                .prefetch_units = prefetch,
                                                                .offload = {state, parameters, true}},
                                                               micro_batches, rounds);
                                    if (state == Tier::disk)
                                        spec.state_pieces.assign(
                                            static_cast<std::size_t>(spec.part.outline->units_count()), 2);
                                    f(spec);
                                }
}

TEST(Sharding, EveryListIsSound) {
    int lists = 0;
    const auto check_all = [&](const StepSpec& spec) {
        for (const auto build : {build_training_step, build_update_step, build_evaluation_step,
                                 build_generation_step, build_parameter_gathers}) {
            EXPECT_NO_THROW(check_step(build(spec))) << text_of(spec);
            ++lists;
        }
    };
    for_all(check_all);
    EXPECT_GT(lists, 1200);
    for_all_with_own_memory(check_all);
    EXPECT_GT(lists, 10000);
}

// ---- bytes: the formulas of docs/parallelism.md

TEST(Sharding, SendsWhatTheFormulasSay) {
    std::vector<UnitBytes> units;
    for (std::uint64_t unit = 0; unit < layers + 3; ++unit)
        units.push_back({.parameters = 24 * 1000 * (unit + 1), .gradients = 24 * 4000 * (unit + 2)});
    std::uint64_t W = 0, G = 0;
    for (const UnitBytes& unit : units) {
        W += unit.parameters;
        G += unit.gradients;
    }
    // Each micro-batch needs these once: the embeddings, the last layernorm, and the last block, whose
    // backward pass directly follows its forward pass.
    const std::uint64_t w = units[wte_unit].parameters + units[wpe_unit].parameters +
                            units[static_cast<std::size_t>(ln_f_unit(layers))].parameters +
                            units[static_cast<std::size_t>(block_unit(layers - 1))].parameters;
    const auto outline = outline_of_layers(layers);
    const ModelLists lists = derive_lists(*outline, {});
    for_all([&](const StepSpec& spec) {
        const Sharding& s = spec.sharding;
        const auto N = static_cast<std::uint64_t>(s.shards), R = static_cast<std::uint64_t>(s.replicas);
        const auto m = static_cast<std::uint64_t>(spec.pipeline.micro_batches);
        const std::uint64_t r = s.reduces_each_micro_batch ? m : 1;
        const std::uint64_t once = s.reshards_after_forward ? w : W;
        const std::uint64_t whole[] = {(r + 1) * G, r * G + W, r * G + W, r * G + m * (2 * W - once)};
        const BytesSent sent = bytes_sent(build_training_step(spec), units, lists);
        EXPECT_EQ(sent.stages + sent.tied, 0U);
        EXPECT_EQ(sent.inside, whole[s.stage] / N * (N - 1)) << text_of(spec);
        EXPECT_EQ(sent.across, 2 * r * (G / N) / R * (R - 1)) << text_of(spec);
    });
}

TEST(Sharding, OneProcessSendsNothing) {
    const Step step = build_training_step(whole_spec(layers, {}, 2));
    EXPECT_FALSE(communicates(step));
    EXPECT_TRUE(build_parameter_gathers(whole_spec(layers, {}, 1)).actions.empty());
}

// ---- memory

constexpr GPTConfig gpt2_124m{
    .layers = 12, .heads = 12, .channels = 768, .sequence_length = 1024, .vocabulary = 50257};

std::map<ArenaKind, double> bytes_by_arena(const Sharding& sharding, const StoreDtypes& dtypes,
                                           int micro_batches) {
    MemoryLayout layout;
    lay_out_store(layout, dtypes, whole_model(outline_of(gpt2_124m)), sharding, micro_batches);
    std::map<ArenaKind, double> bytes;
    for (const ArenaKind arena : all_arenas) bytes[arena] = static_cast<double>(layout.bytes(arena));
    return bytes;
}

// GPT-2 124M in bf16, bytes at stages 0 to 3: (14+g)N; (2+g)N + 12N/n; 2N + (12+g)N/n; (14+g)N/n. Stages 2
// and 3 also have full-size buffers. N is the number of parameters, n of shards, and g the bytes of a
// gradient's element.
TEST(Sharding, TakesTheMemoryThatTheFormulasSay) {
    constexpr int n = 8;
    double N = 0, largest_block = 0,
           ends = 0;  // elements; the last two: sizes of the full-size buffers at stages 2 and 3
    for (UnitSpec& spec : gpt_units(gpt2_124m)) {
        const UnitLayout unit(std::move(spec));
        const auto elements = static_cast<double>(unit.padded_elements(n));
        N += elements;
        (unit.name().starts_with("h.") ? largest_block : ends) =
            unit.name().starts_with("h.") ? std::max(largest_block, elements) : ends + elements;
    }
    for (const DType gradients : {DType::fp32, DType::bf16}) {
        const auto g = static_cast<double>(size_of(gradients));
        // Gradients in bf16 also have sums in fp32, of one block and of the remaining units.
        const double sums = gradients == DType::bf16 ? 4 * (ends + largest_block) : 0;
        for (int stage = 0; stage <= 3; ++stage) {
            const Sharding sharding{.stage = stage, .shards = n, .reduces_each_micro_batch = stage >= 2};
            const auto found = bytes_by_arena(sharding, {DType::bf16, gradients}, 4);
            const double rotating = ends + 2 * largest_block;
            const double parameters = stage < 3 ? 2 * N : 2 * N / n + 2 * rotating;
            const double kept = stage < 2 ? g * N : g * N / n + g * rotating;
            const double updated = stage == 0 ? N : N / n;
            EXPECT_EQ(found.at(ArenaKind::parameters), parameters) << stage;
            EXPECT_EQ(found.at(ArenaKind::gradients), kept + sums) << stage;
            EXPECT_EQ(found.at(ArenaKind::master), 4 * updated) << stage;
            EXPECT_EQ(found.at(ArenaKind::moments), 8 * updated) << stage;
        }
    }
}

TEST(Sharding, MemoryOfTheOptions) {
    const Sharding stage_3{.stage = 3, .shards = 8, .reduces_each_micro_batch = true};
    const StoreDtypes dtypes{DType::bf16, DType::fp32};
    const double block =
        2.0 * static_cast<double>(UnitLayout(gpt_units(gpt2_124m)[block_unit(0)]).padded_elements(8));
    const auto parameters = [&](Sharding sharding) {
        return bytes_by_arena(sharding, dtypes, 4).at(ArenaKind::parameters);
    };
    Sharding other = stage_3;
    other.prefetch_units = 3;
    EXPECT_EQ(parameters(other), parameters(stage_3) + 2 * block);
    other.prefetch_units = 0;
    EXPECT_EQ(parameters(other), parameters(stage_3) - block);
    other.reshards_after_forward = false;
    EXPECT_EQ(parameters(other), parameters(stage_3) + 10 * block);
    // If gradients are reduced once a step, each rank holds all of them.
    other = stage_3;
    other.reduces_each_micro_batch = false;
    EXPECT_EQ(bytes_by_arena(other, dtypes, 4).at(ArenaKind::gradients),
              bytes_by_arena({.shards = 8}, dtypes, 4).at(ArenaKind::gradients));
    EXPECT_EQ(bytes_by_arena(other, dtypes, 1), bytes_by_arena(stage_3, dtypes, 1))
        << "there is one micro-batch";
}

TEST(Sharding, TheNextStageHasMoreInShards) {
    Sharding sharding{.shards = 4};
    std::vector<double> shares;
    for (std::optional<Sharding> next = sharding; next; next = next->next_stage(true)) {
        shares.push_back(next->share_of_optimizer() + next->share_of_gradients() +
                         next->share_of_parameters());
        EXPECT_EQ(next->reduces_each_micro_batch, next->reduces_each_micro_batch_by_default());
        EXPECT_FALSE(next->holds_back_gradients());
    }
    EXPECT_EQ(shares, (std::vector{3.0, 2.25, 1.5, 0.75}));
    // The user's own choice stays.
    for (const bool each : {false, true}) {
        sharding.reduces_each_micro_batch = each;
        const auto second = sharding.next_stage(false)->next_stage(false);
        EXPECT_EQ(second->reduces_each_micro_batch, each);
        EXPECT_EQ(second->holds_back_gradients(), !each);
    }
    EXPECT_FALSE(Sharding{}.next_stage(true)) << "one rank";
}

// ---- order

const StepSpec& stage_3() {
    static const StepSpec made =
        whole_spec(layers, {.stage = 3, .shards = 4, .reduces_each_micro_batch = true}, 2);
    return made;
}

std::ptrdiff_t place_of(const Step& step, ActionKind kind, int unit, int nth) {
    const auto found = std::ranges::find_if(step.actions, [&](const Action& action) {
        const int layer = layer_of(step.part, action.part);
        const bool of_block = layer >= 0 && block_unit(layer) == unit;
        const bool is_it = action.kind == kind && (action.unit == unit || (action.unit < 0 && of_block));
        return is_it && nth-- == 0;
    });
    EXPECT_NE(found, step.actions.end());
    return found - step.actions.begin();
}

// Whether an action waits for no action from that place on.
bool is_free_before(const Step& step, std::ptrdiff_t action, std::ptrdiff_t place) {
    return std::ranges::all_of(step.actions[static_cast<std::size_t>(action)].after,
                               [&](int after) { return after < place; });
}

TEST(Sharding, ParametersAreGatheredWhileThePartBeforeIsComputed) {
    const Step step = build_training_step(stage_3());
    for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        for (int block = 1; block + 1 < layers; ++block) {
            const auto gather =
                place_of(step, ActionKind::gather_parameters, block_unit(block), 2 * micro_batch);
            const auto before = place_of(step, ActionKind::forward, block_unit(block - 1), micro_batch);
            EXPECT_LT(gather, before);
            EXPECT_TRUE(is_free_before(step, gather, before));
            const auto again =
                place_of(step, ActionKind::gather_parameters, block_unit(block), 2 * micro_batch + 1);
            const auto after = place_of(step, ActionKind::backward, block_unit(block + 1), micro_batch);
            EXPECT_LT(again, after);
            EXPECT_TRUE(is_free_before(step, again, after));
        }
    }
    // An addition to a shard comes after the computation of another part, so its reduction had time to
    // finish.
    const auto adds = place_of(step, ActionKind::accumulate_shard, block_unit(2), 0);
    EXPECT_GT(adds, place_of(step, ActionKind::backward, block_unit(1), 1));
}

TEST(Sharding, WithoutPrefetchItIsGatheredWhenItIsNeeded) {
    StepSpec spec = stage_3();
    spec.sharding.prefetch_units = 0;
    const Step step = build_training_step(spec);
    EXPECT_EQ(place_of(step, ActionKind::gather_parameters, block_unit(1), 0) + 1,
              place_of(step, ActionKind::forward, block_unit(1), 0));
}

// ---- faults, planted in sound lists

void expect_fault(const StepSpec& sound, ActionKind kind, int unit, int nth, const std::string& message) {
    Step step = build_training_step(sound);
    step.actions.erase(step.actions.begin() + place_of(step, kind, unit, nth));
    expect_found(std::move(step), message);
}

TEST(CheckShardedStep, FindsWhatIsMissing) {
    StepSpec hybrid = stage_3();
    hybrid.sharding.replicas = 2;
    for (const StepSpec& spec : {stage_3(), hybrid}) {
        for (const int nth : {0, 1, 2, 3})
            expect_fault(spec, ActionKind::gather_parameters, block_unit(1), nth, "not gathered");
        expect_fault(spec, ActionKind::gather_parameters, wte_unit, 1, "not gathered");
        expect_fault(spec, ActionKind::release, block_unit(1), 0, "in use");
        expect_fault(spec, ActionKind::release, wte_unit, 0, "in use");
        expect_fault(spec, ActionKind::reduce_scatter, block_unit(1), 0,
                     spec.sharding.replicas == 1 ? "still needed" : "nobody reduced");
        expect_fault(spec, ActionKind::reduce_scatter, block_unit(0), 1, "nobody received");
        expect_fault(spec, ActionKind::accumulate_shard, block_unit(2), 0, "still needed");
    }
    for (const int stage : {0, 1}) {
        StepSpec spec = stage_3();
        spec.sharding.stage = stage;
        expect_fault(spec, ActionKind::reduce_scatter, block_unit(1), 0, "still needed");
        expect_fault(spec, ActionKind::accumulate_shard, wte_unit, 0, "lacks a micro-batch");
    }
}

TEST(CheckShardedStep, FindsABufferThatIsZeroedBeforeItIsReduced) {
    // The reduction of the earlier unit has not yet read its gradients.
    Step step = build_training_step(stage_3());
    const auto reduce = step.actions.begin() + place_of(step, ActionKind::reduce_scatter, block_unit(4), 0);
    const auto zero = step.actions.begin() + place_of(step, ActionKind::zero, block_unit(2), 0);
    std::rotate(reduce, reduce + 1, zero + 1);
    order_streams(step);
    EXPECT_THROW(check_step(step), ProgrammingError);
}

}  // namespace
}  // namespace llmc
