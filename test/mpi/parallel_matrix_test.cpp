// The parallel matrix of GPT-2 and of other families: all settings for the number of ranks of this job. `make
// test` trains enough of them that every two values meet on some number of ranks; the family is one of the
// values. `make test-matrix` trains each setting of GPT-2.
//
// Runs that differ only in the schedule, the ZeRO stage or recompute agree bit by bit. In fp32, every run is
// near that of one process.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "mpi_test.h"
#include "parallel_matrix.h"

namespace llmc {
namespace {

using test::Equals;
using test::TrainingSetting;

// Eight layers, so that each of 4 stages has 2 chunks. Two heads and an even number of tokens, so that ranks
// can share them. No other size is a multiple of 8.
constexpr GPTConfig config{.layers = 8, .heads = 2, .channels = 14, .sequence_length = 6, .vocabulary = 37};
const test::Matrix matrix{.plain = {.config = config, .sequences = 16, .steps = 30, .reads = true},
                          .meshes = test::meshes_of_powers_of_two()};

// The other families. Two key heads are fewer than four tensor-parallel ranks, but a norm over all heads does
// not suit ranks that share one. No size of a bias is a multiple of 128 elements.
std::vector<Model> make_models() {
    const auto small = [](const char* name, std::vector<std::pair<std::string, ModelValue>> changes) {
        const std::initializer_list<std::pair<const char*, std::int64_t>> sizes = {
            {"layers", 8}, {"heads", 4}, {"seq-len", 8}, {"mlp-size", 12}, {"vocab-size", 37}};
        for (const auto& [option, size] : sizes) changes.emplace_back(option, size);
        return model_with(name, changes);
    };
    const ModelValue two = std::int64_t{2}, four = std::int64_t{4}, six = std::int64_t{6};
    const ModelValue head = std::string("head"), all = std::string("all"), behind = std::string("behind");
    const std::pair<std::string, ModelValue> channels{"channels", std::int64_t{14}};
    return {small("llama-tiny", {channels, {"head-size", six}, {"kv-heads", two}}),
            small("qwen3-tiny", {channels,
                                 {"head-size", six},
                                 {"kv-heads", two},
                                 {"qk-norm", head},
                                 {"window", std::int64_t{3}},
                                 {"qkv-bias", true}}),
            small("llama-tiny",
                  {channels, {"head-size", six}, {"kv-heads", four}, {"qk-norm", all}, {"norms", behind}}),
            small("nanochat-tiny", {{"channels", std::int64_t{16}}, {"kv-heads", two}, {"z-loss", 1e-3}})};
}
// Matrices of GPT-2 and of each of these.
const std::vector<test::Matrix>& matrices() {
    static const std::vector<Model> models = make_models();
    static const std::vector<test::Matrix> made = [] {
        std::vector<test::Matrix> all = {matrix};
        for (const Model& model : models) {
            test::Matrix& of_family = all.emplace_back(matrix);
            of_family.plain.model = &model;
            of_family.plain.family = static_cast<int>(all.size()) - 1;
            of_family.plain.steps = 20;
            of_family.meshes.insert(of_family.meshes.end(), {{1, 1, 4}, {1, 1, 4, true}});
        }
        return all;
    }();
    return made;
}
std::vector<Equals> whole_of_all() {
    std::vector<Equals> all;
    for (const test::Matrix& one : matrices()) std::ranges::move(whole_matrix(one), std::back_inserter(all));
    return all;
}

// These values must meet all together, because the order of the list depends on all of them. Some blocks
// recompute, and others do not, while shards of gradients are received.
bool must_be_in_part(const TrainingSetting& s) {
    return s.family == 0 && s.ranks() == 4 && s.schedule == PipelineSchedule::zb_h1 &&
           s.sharding.stage == 2 && s.sharding.reduces_each_micro_batch && s.micro_batches == 4 &&
           s.dtype == DType::fp32 && s.recompute == Recompute{.kind = RecomputeKind::block, .every = 2};
}

const std::vector<Equals>& part_of_matrix() {
    static const std::vector<Equals> part = test::part_of_matrix(whole_of_all(), must_be_in_part);
    return part;
}

TEST(ParallelMatrix, EveryTwoValuesMeetInRunsThatAreTheSame) {
    for (const Equals& settings : part_of_matrix()) {
        const auto family = static_cast<std::size_t>(settings.front().family);
        if (fits_here(settings)) expect_one_run(matrices()[family], settings);
    }
}

// The part does what its name says: every two values meet in it.
TEST(ParallelMatrix, HasAPartInWhichEveryTwoValuesMeet) {
    const std::vector<Equals>& part = part_of_matrix();
    std::size_t count = 0;
    std::int64_t hard = 0;
    for (const Equals& settings : part) {
        count += settings.size();
        hard += std::ranges::count_if(settings, must_be_in_part);
    }
    EXPECT_EQ(hard, 1);
    EXPECT_EQ(count_unmet(whole_of_all(), part), 0);
    EXPECT_LT(count, 125U);
}

class WholeMatrix : public testing::TestWithParam<Equals> {};

TEST_P(WholeMatrix, TrainsOneRun) {
    if (!fits_here(GetParam())) GTEST_SKIP() << "needs another number of ranks";
    expect_one_run(matrix, GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, WholeMatrix, testing::ValuesIn(whole_matrix(matrix)),
                         [](const auto& run) { return name_of_run(run.param); });

}  // namespace
}  // namespace llmc
