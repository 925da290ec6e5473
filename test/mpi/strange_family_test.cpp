// The parallel matrix of the strange family (test/strange_family.h).
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "interpreted_training.h"
#include "mpi_test.h"
#include "parallel_matrix.h"
#include "test/strange_family.h"

namespace llmc {
namespace {

using test::Equals;
using test::TrainingSetting;

// Each stage sums the gradients of the shared matrix in the order of its backward passes; then the stages'
// sums are added. With one chunk for each stage, all schedules have the same order. Micro-batches follow one
// another from the first on, and the layers of each run from the last to the first. Several chunks put
// other layers on a stage, and interleaved ones mix passes of different chunks. (zb-h1 would also change the
// order, if only some of a stage's layers with the matrix recomputed. The layers that recompute have one
// backward pass, and the others have a second, later one. No setting here has such a stage.)
int order_of_sums(const TrainingSetting& setting) {
    return setting.schedule == PipelineSchedule::interleaved     ? 1
           : setting.schedule == PipelineSchedule::breadth_first ? 2
                                                                 : 0;
}

test::Matrix make_matrix() {
    static const Model model = strange::model();
    std::vector<test::MeshSizes> meshes = test::meshes_of_powers_of_two();
    meshes.insert(meshes.end(), {{3, 1, 1}, {1, 4, 1, false, 2}, {2, 4, 1, false, 2}});
    return {.plain = {.model = &model, .sequences = 16, .steps = 12, .reads = true},
            .meshes = std::move(meshes),
            .order_of_sums = order_of_sums};
}
const test::Matrix& matrix() {
    static const test::Matrix made = make_matrix();
    return made;
}
// 20 roundings a layer of sums of at most 40 terms.
constexpr double bound = 20 * strange::layers * strange::wide * 6e-8;

bool none(const TrainingSetting&) { return false; }

TEST(StrangeFamily, EveryTwoValuesMeetInRunsThatAreTheSame) {
    for (const Equals& settings : part_of_matrix(whole_matrix(matrix()), none)) {
        if (fits_here(settings)) expect_one_run(matrix(), settings);
    }
}

// Three stages, whose chunks have one or two different layers.
TEST(StrangeFamily, HasUnlikeChunksOfThreeStages) {
    if (test::world().size() != 3) GTEST_SKIP() << "takes 3 ranks";
    test::Matrix of_three = matrix();
    of_three.plain.sequences = 24;
    Equals settings;
    for (const RecomputeKind kind : {RecomputeKind::none, RecomputeKind::selective, RecomputeKind::block}) {
        for (const int every : {1, 2, 3}) {
            TrainingSetting& setting = settings.emplace_back(of_three.plain);
            setting.pipeline = setting.micro_batches = 3;
            setting.schedule = PipelineSchedule::interleaved;
            setting.virtual_stages = 2;
            setting.recompute = {.kind = kind, .every = every};
        }
    }
    expect_one_run(of_three, settings);
}

// AdamW's first moment after one step is a tenth of the gradient, clipped to a norm of 1. The bound is that
// of interpreter_test.cpp: 20 roundings a layer of sums of at most 40 terms here. Each mesh adds these in its
// own order.
TEST(StrangeFamily, HasTheGradientsOfItsInterpreter) {
    TrainingSetting setting = matrix().plain;
    setting.steps = 1;
    for (const test::MeshSizes& mesh : matrix().meshes) {
        if (mesh.ranks() != test::world().size()) continue;
        setting.pipeline = mesh.pipeline;
        setting.tensor = mesh.tensor;
        setting.sequence_parallel = mesh.sequence_parallel;
        setting.sharding = {.stage = mesh.data > 1 ? 3 : 0, .shards = mesh.data};
        setting.micro_batches = 2;
        const test::TrainingResult result = test::train(test::world(), setting);
        if (test::world().rank() == 0) test::expect_interpreted(setting, result, bound);
    }
}

// With undivided and with split backward passes.
TEST(StrangeFamily, HasTheGradientsOfItsInterpreterWhereTheyShareMemory) {
    static const Model model = strange::model_of_shared_gradients();
    const int ranks = test::world().size();
    if (ranks != 2 && ranks != 4) GTEST_SKIP() << "takes 2 or 4 ranks";
    TrainingSetting setting = matrix().plain;
    setting.model = &model;
    setting.steps = 1;
    setting.pipeline = 2;
    setting.tensor = ranks / 2;
    setting.micro_batches = 2;
    for (const PipelineSchedule schedule : {PipelineSchedule::one_f_one_b, PipelineSchedule::zb_h1}) {
        for (const bool sequence_parallel : {false, true}) {
            setting.schedule = schedule;
            setting.sequence_parallel = sequence_parallel && setting.tensor > 1;
            const test::TrainingResult result = test::train(test::world(), setting);
            if (test::world().rank() == 0) test::expect_interpreted(setting, result, bound);
        }
    }
}

class StrangeWholeMatrix : public testing::TestWithParam<Equals> {};

TEST_P(StrangeWholeMatrix, TrainsOneRun) {
    if (!fits_here(GetParam())) GTEST_SKIP() << "needs another number of ranks";
    expect_one_run(matrix(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, StrangeWholeMatrix, testing::ValuesIn(whole_matrix(matrix())),
                         [](const auto& run) { return name_of_run(run.param); });

}  // namespace
}  // namespace llmc
