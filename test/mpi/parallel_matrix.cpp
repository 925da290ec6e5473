#include "parallel_matrix.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>

#include "mpi_test.h"

namespace llmc::test {

std::vector<MeshSizes> meshes_of_powers_of_two() {
    return {{1, 1, 1}, {1, 2, 1},       {2, 1, 1}, {2, 2, 1},       {4, 1, 1}, {4, 2, 1},
            {1, 1, 2}, {1, 1, 2, true}, {1, 2, 2}, {1, 2, 2, true}, {2, 1, 2}, {2, 1, 2, true},
            {2, 2, 2}, {2, 2, 2, true}, {4, 1, 2}, {4, 1, 2, true}};
}

namespace {

// ---- the matrix

struct Order {
    PipelineSchedule schedule;
    int virtual_stages = 1;
};
constexpr std::array all_orders = {Order{PipelineSchedule::one_f_one_b},
                                   Order{PipelineSchedule::naive},
                                   Order{PipelineSchedule::gpipe},
                                   Order{PipelineSchedule::interleaved, 2},
                                   Order{PipelineSchedule::breadth_first, 2},
                                   Order{PipelineSchedule::zb_h1}};

constexpr std::array all_recomputes = {Recompute{},
                                       Recompute{.kind = RecomputeKind::selective},
                                       Recompute{.kind = RecomputeKind::block},
                                       Recompute{.kind = RecomputeKind::selective, .every = 2},
                                       Recompute{.kind = RecomputeKind::block, .every = 2},
                                       Recompute{.kind = RecomputeKind::block, .every = 3}};

struct Dtypes {
    DType compute, gradients;
};
constexpr std::array all_dtypes = {Dtypes{DType::fp32, DType::fp32}, Dtypes{DType::bf16, DType::fp32},
                                   Dtypes{DType::bf16, DType::bf16}};

struct Accumulation {
    int micro_batches;
    bool each;  // the gradients of each micro-batch are reduced
};
constexpr std::array all_accumulations = {Accumulation{1, false}, Accumulation{4, false},
                                          Accumulation{4, true}, Accumulation{8, false},
                                          Accumulation{8, true}};

// Whether the order of the work depends on which blocks recompute. zb-h1 splits the backward passes of the
// others. Several chunks of a stage share memory if the same blocks recompute.
bool tells_blocks_apart(PipelineSchedule schedule, const MeshSizes& mesh) {
    return mesh.pipeline > 1 &&
           (schedule == PipelineSchedule::zb_h1 || schedule == PipelineSchedule::interleaved ||
            schedule == PipelineSchedule::breadth_first);
}

void add_equals(std::vector<Equals>& all, const Matrix& matrix, const MeshSizes& mesh, const Dtypes& dtypes,
                const Accumulation& accumulation) {
    if (matrix.plain.sequences % (mesh.data * accumulation.micro_batches) != 0) return;
    std::map<int, Equals> by_order;
    for (const Order& order : all_orders) {
        const bool is_interleaved = order.schedule == PipelineSchedule::interleaved;
        if (is_interleaved && accumulation.micro_batches % mesh.pipeline != 0) continue;
        if (mesh.pipeline == 1 && order.schedule != all_orders[0].schedule) continue;
        // A single data rank has everything: this is ZeRO stage 0 for any value of the option.
        for (int stage = 0; stage <= (mesh.data > 1 ? 3 : 0); ++stage) {
            for (const Recompute& recompute : all_recomputes) {
                if (recompute.every > 1 && !tells_blocks_apart(order.schedule, mesh)) continue;
                TrainingSetting setting = matrix.plain;
                setting.dtype = dtypes.compute;
                setting.gradients = dtypes.gradients;
                setting.pipeline = mesh.pipeline;
                setting.tensor = mesh.tensor;
                setting.sequence_parallel = mesh.sequence_parallel;
                const int shards = mesh.shards > 0 && stage > 0 ? mesh.shards : mesh.data;
                setting.sharding = {.stage = stage,
                                    .shards = shards,
                                    .replicas = mesh.data / shards,
                                    .reduces_each_micro_batch = accumulation.each};
                setting.schedule = order.schedule;
                setting.virtual_stages = order.virtual_stages;
                setting.recompute = recompute;
                setting.micro_batches = accumulation.micro_batches;
                by_order[matrix.order_of_sums(setting)].push_back(setting);
            }
        }
    }
    for (const auto& [order, settings] : by_order) all.push_back(settings);
}

// ---- a part in which every two values meet

// The values of a setting, as small numbers.
std::array<int, 11> values_of(const TrainingSetting& s) {
    // Without a pipeline there is no schedule. With one data rank there is nothing to shard.
    const int schedule = s.pipeline == 1 ? 7 : static_cast<int>(s.schedule);
    return {s.pipeline,
            s.sharding.ranks(),
            s.tensor,
            s.tensor == 1 ? 7 : (s.sequence_parallel ? 1 : 0),
            schedule,
            s.sharding.ranks() == 1 ? 7 : s.sharding.stage,
            static_cast<int>(s.recompute.kind) + 2 * static_cast<int>(s.recompute.every - 1),
            s.micro_batches,
            s.sharding.reduces_each_micro_batch ? 1 : 0,
            (s.dtype == DType::bf16 ? 1 : 0) + (s.gradients == DType::bf16 ? 1 : 0),
            s.family};
}

class Pairs {
  public:
    // How many pairs of a setting are new.
    int count_new(const TrainingSetting& setting) const {
        int count = 0;
        for_each(setting, [&](std::size_t pair) { count += met_[pair] ? 0 : 1; });
        return count;
    }
    void add(const TrainingSetting& setting) {
        for_each(setting, [&](std::size_t pair) { met_[pair] = true; });
    }

  private:
    static constexpr std::size_t places = 11, values = 9;

    template <class F>
    static void for_each(const TrainingSetting& setting, F&& f) {
        const auto of = values_of(setting);
        const auto value = [&](std::size_t place) { return static_cast<std::size_t>(of[place]); };
        for (std::size_t a = 0; a < places; ++a) {
            for (std::size_t b = 0; b < a; ++b) f(((a * places + b) * values + value(a)) * values + value(b));
        }
    }

    std::vector<bool> met_ = std::vector<bool>(places * places * values * values);
};

}  // namespace

std::vector<Equals> whole_matrix(const Matrix& matrix) {
    std::vector<Equals> all;
    for (const MeshSizes& mesh : matrix.meshes)
        for (const Dtypes& dtypes : all_dtypes)
            for (const Accumulation& accumulation : all_accumulations)
                add_equals(all, matrix, mesh, dtypes, accumulation);
    return all;
}

// First takes the settings that must be in the part. Then greedily takes the setting with the most new pairs
// for its cost: the ranks that it and its run's plain setting train on.
std::vector<Equals> part_of_matrix(const std::vector<Equals>& whole,
                                   bool (*must_be_in_part)(const TrainingSetting&)) {
    std::vector<Equals> part(whole.size());
    Pairs met;
    const auto take = [&](std::size_t run, std::size_t setting) {
        for (const std::size_t i : {std::size_t{0}, setting}) {
            met.add(whole[run][i]);
            if (i != 0 || part[run].empty()) part[run].push_back(whole[run][i]);
        }
    };
    for (std::size_t run = 0; run < whole.size(); ++run) {
        for (std::size_t i = 1; i < whole[run].size(); ++i) {
            if (must_be_in_part(whole[run][i])) take(run, i);
        }
    }
    // A setting's new pairs, when they were last counted: they only become fewer.
    std::vector<std::vector<int>> at_most;
    for (const Equals& run : whole) at_most.emplace_back(run.size(), std::numeric_limits<int>::max());
    while (true) {
        std::size_t best_run = 0, best = 0;
        double most = 0;
        for (std::size_t run = 0; run < whole.size(); ++run) {
            const double cost = whole[run][0].ranks() * (part[run].empty() ? 2.0 : 1.0);
            // A setting that is alone in its run is itself the plain one.
            for (std::size_t i = whole[run].size() > 1 ? 1 : 0; i < whole[run].size(); ++i) {
                int& pairs = at_most[run][i];
                if (pairs / cost <= most) continue;
                pairs = met.count_new(whole[run][i]);
                const double gain = pairs / cost;
                if (gain > most) {
                    most = gain;
                    best_run = run;
                    best = i;
                }
            }
        }
        if (most == 0) break;
        take(best_run, best);
    }
    std::erase_if(part, [](const Equals& run) { return run.empty(); });
    return part;
}

int count_unmet(const std::vector<Equals>& whole, const std::vector<Equals>& part) {
    Pairs met;
    for (const Equals& settings : part) {
        for (const TrainingSetting& setting : settings) met.add(setting);
    }
    int count = 0;
    for (const Equals& settings : whole) {
        for (const TrainingSetting& setting : settings) count += met.count_new(setting);
    }
    return count;
}

std::string name_of_run(const Equals& run) {
    const TrainingSetting& s = run.front();
    return fmt::format("of_{}_{}{}_stages_{}_data_ranks_{}_tensor_ranks{}_{}{}_{}_micro_batches{}", s.ranks(),
                       s.virtual_stages == 1                         ? ""
                       : s.schedule == PipelineSchedule::interleaved ? "interleaved_"
                                                                     : "breadth_first_",
                       s.pipeline, s.sharding.ranks(), s.tensor, s.sequence_parallel ? "_of_some_tokens" : "",
                       name_of(s.dtype), s.gradients == DType::bf16 ? "_gradients_too" : "", s.micro_batches,
                       s.sharding.reduces_each_micro_batch ? "_reduced_each" : "");
}

// ---- the comparison

namespace {

// A run of one process with the whole batch at once. The root runs it, and the others wait.
const TrainingResult& alone(const TrainingSetting& setting) {
    static std::map<std::pair<const Model*, std::int64_t>, TrainingResult> results;
    const auto [found, is_new] = results.try_emplace({setting.model, setting.sequences});
    const auto root = is_new ? world().split(world().rank() == 0 ? 0 : -1, 0) : nullptr;
    if (root) found->second = train(*root, setting);
    return found->second;
}

// Without rotary positions, the gradient of a key's bias is zero, because it moves all of a query's scores
// equally. Rounding makes it nonzero, and AdamW divides it by its own size. So a bias may move by the learning
// rate in each step, in any direction.
bool is_of_key_bias(const UnitLayout::Entry& entry, std::int64_t element) {
    const Shape& shape = entry.spec.shape;  // GPT-2's (3,NH,HS) of queries, keys and values
    return entry.spec.is_vector && shape.dimensions() == 3 && element / (shape.elements() / 3) == 1;
}

// Meshes add the same numbers in other orders. So sums, and with them losses, differ by a few roundings of
// 6e-8. In a step a weight moves by the learning rate times a quotient of such sums, which is below 1. The
// quotient's errors of 1e-7 to 1e-6 do not grow over the steps while the loss falls smoothly. But where the terms of a
// gradient cancel, so that it is a share s of its typical size, which happens to a share s of all, the error is up to
// 1e-6/s of it. So one element in twenty may be beyond 2e-5, give or take three deviations of that number, and none
// beyond 1e-3, of a weight's size and of the farthest it can have moved. (Leaving out one micro-batch once moves
// weights by more than 1e-2 of it.)
void expect_near_weights(const Model& model, int steps, const TrainingResult& result,
                         const TrainingResult& expected) {
    const double bound = 2e-5, bound_of_all = 1e-3, farthest = steps * learning_rate;
    ASSERT_EQ(result.state.size(), expected.state.size());
    std::size_t first = 0;
    for (const Outline::OutlinedUnit& outlined : outline_of(model).units) {
        const UnitLayout unit(outlined.spec);
        for (const UnitLayout::Entry& entry : unit.entries()) {
            double largest = 0;
            std::int64_t beyond = 0;
            for (std::int64_t i = 0; i < entry.spec.shape.elements(); ++i) {
                if (is_of_key_bias(entry, i)) continue;
                const std::size_t at = first + static_cast<std::size_t>(entry.offset + i);
                const double weight = expected.state[at];
                const double difference = std::abs(result.state[at] - weight) / (std::abs(weight) + farthest);
                largest = std::max(largest, difference);
                beyond += difference > bound ? 1 : 0;
            }
            const double may_be = static_cast<double>(entry.spec.shape.elements()) / 20;
            EXPECT_LE(static_cast<double>(beyond), may_be + 3 * std::sqrt(may_be))
                << unit.full_name(entry.spec);
            EXPECT_LE(largest, bound_of_all) << unit.full_name(entry.spec);
        }
        first += static_cast<std::size_t>(unit.elements());
    }
}

}  // namespace

void expect_one_run(const Matrix& matrix, const Equals& settings) {
    const TrainingResult& one = alone(matrix.plain);
    TrainingResult plain;
    for (const TrainingSetting& setting : settings) {
        SCOPED_TRACE(to_string(setting));
        TrainingResult result = train(world(), setting);
        expect_bytes_of_list(result);
        // The same text through lists that compute the same sums for other numbers of rows.
        if (setting.reads && setting.dtype == DType::fp32) {
            EXPECT_NEAR(result.evaluated, result.diagnosed, 2e-5 * result.diagnosed);
            EXPECT_NEAR(result.generated, result.diagnosed, 2e-5 * result.diagnosed);
        }
        if (&setting == &settings.front()) {
            plain = std::move(result);
            if (world().rank() != 0 || setting.dtype != DType::fp32) continue;
            EXPECT_LT(plain.losses.back(), 0.95 * plain.losses.front());
            expect_near_losses(plain, one, 2e-5);
            expect_near_weights(model_of(setting), setting.steps, plain, one);
        } else {
            expect_same(result, plain);
        }
    }
}

bool fits_here(const Equals& settings) { return settings.front().ranks() == world().size(); }

}  // namespace llmc::test
