// The parallel matrix: {stages of ZeRO} x {pipeline stages and their schedules} x {data ranks} x {tensor-parallel ranks, and
// whether they divide tokens} x {recompute} x {micro-batches, and when they are reduced} x {dtypes}, all that takes as many
// ranks as there are. `make test-matrix` trains each of them; `make test` as many as make every two values meet on some
// number of ranks.
//
// Where only the schedule, the stage of ZeRO or recompute differs, runs are the same to the bit; in fp32 every run is near
// that of one process.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "llmc/model/units.h"
#include "mpi_test.h"
#include "test/gpt2_units.h"
#include "training_run.h"

namespace llmc {
namespace {

using test::TrainingResult;
using test::TrainingSetting;
using test::world;

// Eight layers, so that each of 4 stages has 2 chunks; two heads and an even number of tokens, which ranks share; otherwise
// no size is a multiple of anything.
constexpr GPTConfig config{.layers = 8, .heads = 2, .channels = 14, .sequence_length = 6, .vocabulary = 37};
constexpr int sequences = 16, steps = 30;

// ---- the matrix

struct MeshSizes {
    int pipeline, data, tensor;
    bool sequence_parallel = false;
    int ranks() const { return pipeline * data * tensor; }
};
constexpr std::array all_meshes = {
    MeshSizes{1, 1, 1}, MeshSizes{1, 2, 1},       MeshSizes{2, 1, 1}, MeshSizes{2, 2, 1},
    MeshSizes{4, 1, 1}, MeshSizes{4, 2, 1},       MeshSizes{1, 1, 2}, MeshSizes{1, 1, 2, true},
    MeshSizes{1, 2, 2}, MeshSizes{1, 2, 2, true}, MeshSizes{2, 1, 2}, MeshSizes{2, 1, 2, true},
    MeshSizes{2, 2, 2}, MeshSizes{2, 2, 2, true}, MeshSizes{4, 1, 2}, MeshSizes{4, 1, 2, true}};

struct Order {
    PipelineSchedule schedule;
    int virtual_stages = 1;
};
constexpr std::array all_orders = {Order{PipelineSchedule::one_f_one_b}, Order{PipelineSchedule::naive},
                                   Order{PipelineSchedule::gpipe}, Order{PipelineSchedule::interleaved, 2},
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
    bool each;  // is reduced
};
constexpr std::array all_accumulations = {Accumulation{1, false}, Accumulation{4, false},
                                          Accumulation{4, true}, Accumulation{8, false},
                                          Accumulation{8, true}};

// Whether the order of the work depends on which blocks recompute: zb-h1 splits the others' backward passes, and interleaved
// chunks that keep the same share their memory.
bool tells_blocks_apart(PipelineSchedule schedule, const MeshSizes& mesh) {
    return mesh.pipeline > 1 &&
           (schedule == PipelineSchedule::zb_h1 || schedule == PipelineSchedule::interleaved);
}

// Settings that train the same run to the bit, the plain one first.
using Equals = std::vector<TrainingSetting>;

Equals equals(const MeshSizes& mesh, const Dtypes& dtypes, const Accumulation& accumulation) {
    Equals all;
    for (const Order& order : all_orders) {
        const bool is_interleaved = order.schedule == PipelineSchedule::interleaved;
        if (is_interleaved && accumulation.micro_batches % mesh.pipeline != 0) continue;
        if (mesh.pipeline == 1 && order.schedule != all_orders[0].schedule) continue;
        // One data rank has all there is: it is stage 0 of ZeRO whatever the option says.
        for (int stage = 0; stage <= (mesh.data > 1 ? 3 : 0); ++stage) {
            for (const Recompute& recompute : all_recomputes) {
                if (recompute.every > 1 && !tells_blocks_apart(order.schedule, mesh)) continue;
                all.push_back({.config = config,
                               .dtype = dtypes.compute,
                               .gradients = dtypes.gradients,
                               .pipeline = mesh.pipeline,
                               .tensor = mesh.tensor,
                               .sequence_parallel = mesh.sequence_parallel,
                               .sharding = {.stage = stage,
                                            .shards = mesh.data,
                                            .reduces_each_micro_batch = accumulation.each},
                               .schedule = order.schedule,
                               .virtual_stages = order.virtual_stages,
                               .recompute = recompute,
                               .sequences = sequences,
                               .micro_batches = accumulation.micro_batches,
                               .steps = steps});
            }
        }
    }
    return all;
}

// All, those of one run together.
std::vector<Equals> whole_matrix() {
    std::vector<Equals> all;
    for (const MeshSizes& mesh : all_meshes)
        for (const Dtypes& dtypes : all_dtypes)
            for (const Accumulation& accumulation : all_accumulations)
                all.push_back(equals(mesh, dtypes, accumulation));
    return all;
}

// ---- a part of it in which every two values meet

// What distinguishes a setting, as small numbers.
std::array<int, 10> values_of(const TrainingSetting& s) {
    // Without a pipeline there is no schedule, and with one data rank nothing to shard.
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
            (s.dtype == DType::bf16 ? 1 : 0) + (s.gradients == DType::bf16 ? 1 : 0)};
}

class Pairs {
  public:
    // Of those of a setting, how many are new.
    int count_new(const TrainingSetting& setting) const {
        int count = 0;
        for_each(setting, [&](std::size_t pair) { count += met_[pair] ? 0 : 1; });
        return count;
    }
    void add(const TrainingSetting& setting) {
        for_each(setting, [&](std::size_t pair) { met_[pair] = true; });
    }

  private:
    static constexpr std::size_t places = 10, values = 9;

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

// Four values at once, which the order of the list hangs on: shards of gradients are received while blocks that recompute
// make theirs, and those between do not.
bool must_be_met(const TrainingSetting& s) {
    return s.ranks() == 4 && s.schedule == PipelineSchedule::zb_h1 && s.sharding.stage == 2 &&
           s.sharding.reduces_each_micro_batch && s.micro_batches == 4 && s.dtype == DType::fp32 &&
           s.recompute == Recompute{.kind = RecomputeKind::block, .every = 2};
}

// That; then greedily, what makes most pairs meet for what it costs to train, on all its ranks: itself, and the plain one of
// its run.
std::vector<Equals> part_of_matrix() {
    const std::vector<Equals> whole = whole_matrix();
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
            if (must_be_met(whole[run][i])) take(run, i);
        }
    }
    while (true) {
        std::size_t best_run = 0, best = 0;
        double most = 0;
        for (std::size_t run = 0; run < whole.size(); ++run) {
            const double cost = whole[run][0].ranks() * (part[run].empty() ? 2.0 : 1.0);
            for (std::size_t i = 1; i < whole[run].size(); ++i) {
                const double gain = met.count_new(whole[run][i]) / cost;
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

// ---- what is compared

// The run of one process with the whole batch at once; on the root, the others wait.
const TrainingResult& alone() {
    static const TrainingResult result = [] {
        const auto root = world().split(world().rank() == 0 ? 0 : -1, 0);
        return root ? test::train(*root, {.config = config, .sequences = sequences, .steps = steps})
                    : TrainingResult{};
    }();
    return result;
}

// The gradient of a key's bias is zero, since a query's scores all move by the same. What rounding makes of it AdamW divides
// by its own size: a bias may move by the learning rate in each step, in any direction.
bool is_of_key_bias(const UnitLayout::Entry& entry, std::int64_t element) {
    return entry.spec.name == "attn.c_attn.bias" && element / config.channels == 1;
}

// Meshes add the same numbers in other orders, so that sums differ by a few roundings of 6e-8, and so do losses. A weight
// moves by less than the learning rate in a step, by a quotient of such sums, whose errors of 1e-7 to 1e-6 stay what they
// are over the steps while the loss falls smoothly. The bound is 2e-5 of what a weight is and of how far it can have come.
// (The largest quotient here is near 2e-6. A micro-batch that is left out once moves weights by more than 1e-2 of it.)
void expect_near_weights(const TrainingResult& result, const TrainingResult& expected) {
    constexpr double bound = 2e-5, farthest = steps * test::learning_rate;
    ASSERT_EQ(result.state.size(), expected.state.size());
    std::size_t first = 0;
    for (const UnitSpec& spec : gpt_units(config)) {
        const UnitLayout unit(spec);
        for (const UnitLayout::Entry& entry : unit.entries()) {
            double largest = 0;
            for (std::int64_t i = 0; i < entry.spec.shape.elements(); ++i) {
                if (is_of_key_bias(entry, i)) continue;
                const std::size_t at = first + static_cast<std::size_t>(entry.offset + i);
                const double weight = expected.state[at];
                largest =
                    std::max(largest, std::abs(result.state[at] - weight) / (std::abs(weight) + farthest));
            }
            EXPECT_LE(largest, bound) << unit.full_name(entry.spec);
        }
        first += static_cast<std::size_t>(unit.elements());
    }
}

// Each of the settings trains the same, to the bit; near what one process does, in fp32; and sends what its list says.
void expect_one_run(const Equals& settings) {
    const TrainingResult& one = alone();
    TrainingResult plain;
    for (const TrainingSetting& setting : settings) {
        SCOPED_TRACE(to_string(setting));
        TrainingResult result = test::train(world(), setting);
        expect_bytes_of_list(result);
        if (&setting == &settings.front()) {
            plain = std::move(result);
            if (world().rank() != 0 || setting.dtype != DType::fp32) continue;
            EXPECT_LT(plain.losses.back(), 0.95 * plain.losses.front());
            expect_near_losses(plain, one, 2e-5);
            expect_near_weights(plain, one);
        } else {
            expect_same(result, plain);
        }
    }
}

bool fits_here(const Equals& settings) { return settings.front().ranks() == world().size(); }

TEST(ParallelMatrix, EveryTwoValuesMeetInRunsThatAreTheSame) {
    for (const Equals& settings : part_of_matrix()) {
        if (fits_here(settings)) expect_one_run(settings);
    }
}

// The part is no smaller than it says.
TEST(ParallelMatrix, HasAPartInWhichEveryTwoValuesMeet) {
    Pairs met;
    std::size_t count = 0;
    std::int64_t hard = 0;
    for (const Equals& settings : part_of_matrix()) {
        count += settings.size();
        for (const TrainingSetting& setting : settings) met.add(setting);
        hard += std::ranges::count_if(settings, must_be_met);
    }
    EXPECT_EQ(hard, 1);
    for (const Equals& settings : whole_matrix()) {
        for (const TrainingSetting& setting : settings) EXPECT_EQ(met.count_new(setting), 0);
    }
    EXPECT_LT(count, 100U);
}

class WholeMatrix : public testing::TestWithParam<Equals> {};

TEST_P(WholeMatrix, TrainsOneRun) {
    if (!fits_here(GetParam())) GTEST_SKIP() << "takes other ranks";
    expect_one_run(GetParam());
}

std::string name_of_run(const testing::TestParamInfo<Equals>& info) {
    const TrainingSetting& s = info.param.front();
    return fmt::format("of_{}_{}_stages_{}_data_ranks_{}_tensor_ranks{}_{}{}_{}_micro_batches{}", s.ranks(),
                       s.pipeline, s.sharding.ranks(), s.tensor, s.sequence_parallel ? "_of_some_tokens" : "",
                       name_of(s.dtype), s.gradients == DType::bf16 ? "_gradients_too" : "", s.micro_batches,
                       s.sharding.reduces_each_micro_batch ? "_reduced_each" : "");
}

INSTANTIATE_TEST_SUITE_P(All, WholeMatrix, testing::ValuesIn(whole_matrix()), name_of_run);

}  // namespace
}  // namespace llmc
