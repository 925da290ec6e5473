// The parallel matrix of a strange family (test/strange_family.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "llmc/model/init.h"
#include "mpi_test.h"
#include "parallel_matrix.h"
#include "test/interpreter.h"
#include "test/strange_family.h"

namespace llmc {
namespace {

using test::Equals;
using test::TrainingSetting;

// A sum of gradients of the shared matrix is made by each stage, in the order of its backward passes, and then over stages.
// Where a stage has one chunk all schedules have that order: a micro-batch's layers follow each other from the last to the
// first, and micro-batches from the first on. Interleaved chunks put other layers on a stage, and passes of other chunks
// between those of one. (zb-h1 would have another order too, if of a stage's layers with the matrix some recomputed and some
// did not: those that do have one pass, the others a second one later. No setting here has such a stage.)
int order_of_sums(const TrainingSetting& setting) {
    return setting.schedule == PipelineSchedule::interleaved ? 1 : 0;
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
using interpreter::Numbers;

// Of the state's weights (0), first moments (1) or second ones (2), by their names; calls f(name, values).
template <class F>
void for_each_of_state(const std::vector<UnitLayout>& units, std::span<const float> state, F&& f) {
    for (const UnitLayout& unit : units) {
        for (const UnitLayout::Entry& entry : unit.entries()) {
            const auto values = state.subspan(static_cast<std::size_t>(entry.offset),
                                              static_cast<std::size_t>(entry.spec.shape.elements()));
            f(unit.full_name(entry.spec), values);
        }
        state = state.subspan(static_cast<std::size_t>(unit.elements()));
    }
}

double norm(const Numbers& x) { return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0)); }

void expect_interpreted(const TrainingSetting& setting, const test::TrainingResult& result) {
    const Model& model = *setting.model;
    std::vector<UnitLayout> units;
    interpreter::Parameters initial;
    for (const Outline::OutlinedUnit& outlined : outline_of(model).units) {
        const UnitLayout& unit = units.emplace_back(outlined.spec);
        std::vector<float> values(static_cast<std::size_t>(unit.elements()));
        initialize_unit(values, 0, unit, 1);
        for_each_of_state({unit}, values, [&](const std::string& name, std::span<const float> of) {
            initial[name] = Numbers(of.begin(), of.end());
        });
    }
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(setting.sequences * model.sequence_length)),
        targets(tokens.size());
    test::fill_tokens(model, 0, 1, tokens, targets);
    const interpreter::Result exact =
        interpreter::interpret(model, initial, tokens, targets, 1 / static_cast<double>(tokens.size()));
    double squares = 0;
    for (const auto& [name, gradient] : exact.gradients) squares += norm(gradient) * norm(gradient);
    constexpr double bound = 20 * strange::layers * strange::wide * 6e-8;
    EXPECT_NEAR(result.losses[0], exact.loss, bound * exact.loss);
    EXPECT_NEAR(result.norms[0], squares, bound * squares);
    const double part = 0.1 * std::min(1.0, 1 / (std::sqrt(squares) + 1e-6));
    for_each_of_state(units, std::span(result.state).subspan(result.state.size() / 3),
                      [&](const std::string& name, std::span<const float> m) {
                          const Numbers& expected = exact.gradients.at(name);
                          Numbers difference(m.begin(), m.end());
                          for (std::size_t i = 0; i < difference.size(); ++i)
                              difference[i] = difference[i] / part - expected[i];
                          EXPECT_LE(norm(difference), bound * norm(expected)) << name;
                      });
}

bool none(const TrainingSetting&) { return false; }

TEST(StrangeFamily, EveryTwoValuesMeetInRunsThatAreTheSame) {
    for (const Equals& settings : part_of_matrix(whole_matrix(matrix()), none)) {
        if (fits_here(settings)) expect_one_run(matrix(), settings);
    }
}

// Of three stages, whose chunks have one layer or two, and not the same ones.
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

// AdamW's first moment of one step is a tenth of the gradient, clipped to a norm of 1. As interpreter_test.cpp: each number is
// off by 20 roundings a layer of sums of at most 40 terms here, which all meshes add in one order or another.
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
        if (test::world().rank() == 0) expect_interpreted(setting, result);
    }
}

// With a backward pass in one part, and in two.
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
            if (test::world().rank() == 0) expect_interpreted(setting, result);
        }
    }
}

class StrangeWholeMatrix : public testing::TestWithParam<Equals> {};

TEST_P(StrangeWholeMatrix, TrainsOneRun) {
    if (!fits_here(GetParam())) GTEST_SKIP() << "takes other ranks";
    expect_one_run(matrix(), GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, StrangeWholeMatrix, testing::ValuesIn(whole_matrix(matrix())),
                         [](const auto& run) { return name_of_run(run.param); });

}  // namespace
}  // namespace llmc
