// Pipeline schedules. Each is sound. Its idle time and its number of held activations follow its closed
// formula. Planted faults are found.
#include "llmc/parallel/pipeline/pipeline_schedule.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/parallel/pipeline/pipeline_simulation.h"

namespace llmc {
namespace {

using Passes = std::vector<std::vector<Pass>>;

std::string text_of(const PipelineSpec& spec) {
    return fmt::format("{}, {} stages of {} chunks, {} micro-batches", name_of(spec.schedule), spec.stages,
                       spec.virtual_stages, spec.micro_batches);
}

// Calls f with every schedule of 2 to 16 stages and 1 to 64 micro-batches.
void for_all(const std::function<void(const PipelineSpec&)>& f) {
    for (const PipelineSchedule schedule : all_pipeline_schedules) {
        const bool is_interleaved = schedule == PipelineSchedule::interleaved;
        const bool has_chunks = is_interleaved || schedule == PipelineSchedule::breadth_first;
        for (int p = 2; p <= 16; ++p)
            for (int v = is_interleaved ? 2 : 1; v <= (has_chunks ? 4 : 1); ++v)
                for (int m = is_interleaved ? p : 1; m <= 64; m += is_interleaved ? p : 1)
                    f({.schedule = schedule, .stages = p, .virtual_stages = v, .micro_batches = m});
    }
}

// Whole numbers, whose sums are exact. Times are equal, or each of the three is the smallest, the largest or
// between the others. Some are far apart, some zero.
constexpr PassTimes some_times[] = {{1, 1, 1}, {2, 2, 1},  {1, 2, 1},   {1, 1, 2},   {2, 1, 1}, {3, 4, 5},
                                    {4, 5, 3}, {5, 3, 4},  {5, 4, 3},   {4, 3, 5},   {3, 5, 4}, {2, 3, 2},
                                    {1, 9, 9}, {9, 1, 10}, {10, 10, 1}, {7, 64, 11}, {1, 0, 0}, {0, 1, 0}};

// The idle time of a stage. `times` are those of one chunk. The F, B and W of a whole stage with v chunks are
// v times as long.
double formula_of_idle(const PipelineSpec& spec, const PassTimes& times) {
    const double p = spec.stages, m = spec.micro_batches;
    const double F = times.forward, B = times.backward_input, W = times.backward_weight;
    switch (spec.schedule) {
        case PipelineSchedule::naive:
            return (p - 1) * m * (F + B + W);
        case PipelineSchedule::gpipe:
        case PipelineSchedule::one_f_one_b:
        case PipelineSchedule::interleaved:  // (p-1) (vF + vB + vW) / v
            return (p - 1) * (F + B + W);
        case PipelineSchedule::
            breadth_first:  // With fewer micro-batches than stages, each chunk waits for the one before.
            return ((p - 1) + (spec.virtual_stages - 1) * std::max(0.0, p - m)) * (F + B + W);
        case PipelineSchedule::zb_h1:
            return (p - 1) * (F + B) - (std::min(m, p) - 1) * std::min({F, B, W});
    }
    return -1;
}

// Number of passes of chunks in flight on a stage.
int formula_of_flight(const PipelineSpec& spec, int stage) {
    const int p = spec.stages, v = spec.virtual_stages, m = spec.micro_batches;
    switch (spec.schedule) {
        case PipelineSchedule::naive:
            return 1;
        case PipelineSchedule::gpipe:
            return m;
        case PipelineSchedule::breadth_first:
            return m * v;
        case PipelineSchedule::one_f_one_b:
            return std::min(m, p - stage);
        case PipelineSchedule::interleaved:
            return std::min(m * v, p * v + p - 1 - 2 * stage);
        case PipelineSchedule::zb_h1:
            return std::min(m, p);
    }
    return -1;
}

TEST(Pipeline, EveryScheduleIsSound) {
    int schedules = 0;
    for_all([&](const PipelineSpec& spec) {
        EXPECT_NO_THROW(check_chunks(spec, spec.chunks())) << text_of(spec);
        EXPECT_NO_THROW(check_passes(spec, pipeline_passes(spec))) << text_of(spec);
        ++schedules;
    });
    EXPECT_GT(schedules, 4 * 15 * 64);
}

TEST(Pipeline, IdlesAsTheFormulasSay) {
    for_all([&](const PipelineSpec& spec) {
        const Passes passes = pipeline_passes(spec);
        for (const PassTimes& times : some_times) {
            const Timeline timeline = simulate(spec, passes, equal_times(spec, times));
            const double idle = formula_of_idle(spec, times);
            const double work = spec.micro_batches * spec.virtual_stages *
                                (times.forward + times.backward_input + times.backward_weight);
            EXPECT_EQ(timeline.total(), work + idle)
                << text_of(spec) << "; F " << times.forward << " B " << times.backward_input << " W "
                << times.backward_weight;
        }
    });
}

TEST(Pipeline, StagesWaitAndHoldActivationsAsTheFormulasSay) {
    for_all([&](const PipelineSpec& spec) {
        const PassTimes times{2, 3, 1};
        const Timeline timeline = simulate(spec, pipeline_passes(spec), equal_times(spec, times));
        const double idle = formula_of_idle(spec, times), work = 6 * spec.micro_batches * spec.virtual_stages;
        for (int stage = 0; stage < spec.stages; ++stage) {
            EXPECT_EQ(timeline.work(stage), work) << text_of(spec);
            EXPECT_EQ(timeline.idle(stage), idle) << text_of(spec);
            const int most = formula_of_flight(spec, stage);
            EXPECT_EQ(timeline.peak_in_flight(stage), static_cast<double>(most) / spec.virtual_stages)
                << text_of(spec) << ", stage " << stage;
            EXPECT_EQ(passes_in_flight(spec, stage), most) << text_of(spec) << ", stage " << stage;
        }
        const Bubble found = bubble(timeline);
        EXPECT_DOUBLE_EQ(found.over_useful, idle / work) << text_of(spec);
        EXPECT_DOUBLE_EQ(found.over_total, idle / (idle + work)) << text_of(spec);
    });
}

TEST(Pipeline, BubbleInBothConventions) {
    const PipelineSpec spec{.stages = 4, .micro_batches = 8};
    const Bubble found = bubble(simulate(spec, pipeline_passes(spec), equal_times(spec, {1, 1, 1})));
    EXPECT_DOUBLE_EQ(found.over_useful, 3.0 / 8);
    EXPECT_DOUBLE_EQ(found.over_total, 3.0 / 11);
    EXPECT_EQ(bubble({}).over_total, 0);
}

// That of many micro-batches from the first ones.
TEST(Pipeline, BubbleOfALongerStep) {
    const auto timeline = [](int micro_batches) {
        const PipelineSpec spec{.stages = 4, .micro_batches = micro_batches};
        return simulate(spec, pipeline_passes(spec), equal_times(spec, {1, 2, 1}));
    };
    Timeline few = timeline(10);
    const Bubble many = bubble(few, timeline(11), 1014);
    EXPECT_NEAR(many.over_total, bubble(timeline(1024)).over_total, 1e-12);
    EXPECT_NEAR(many.over_total, 3.0 / 1027, 1e-12);
    few.bubble_of_step = many;
    EXPECT_EQ(bubble(few).over_useful, many.over_useful);
}

TEST(Pipeline, ASchedulesPassesAsLiteratureDrawsThem) {
    const auto text = [](const PipelineSpec& spec, std::size_t stage) {
        const Passes passes = pipeline_passes(spec);
        std::string all;
        for (const Pass& pass : passes[stage]) {
            const char kind = pass.kind == PassKind::forward           ? 'F'
                              : pass.kind == PassKind::backward_weight ? 'W'
                                                                       : 'B';
            all += fmt::format("{}{}{}{}", all.empty() ? "" : " ", kind, pass.micro_batch,
                               std::string(static_cast<std::size_t>(pass.chunk / spec.stages), '\''));
        }
        return all;
    };
    PipelineSpec spec{.schedule = PipelineSchedule::naive, .stages = 3, .micro_batches = 4};
    EXPECT_EQ(text(spec, 0), "F0 B0 F1 B1 F2 B2 F3 B3");
    spec.schedule = PipelineSchedule::gpipe;
    EXPECT_EQ(text(spec, 1), "F0 F1 F2 F3 B0 B1 B2 B3");
    spec.schedule = PipelineSchedule::one_f_one_b;
    EXPECT_EQ(text(spec, 0), "F0 F1 F2 B0 F3 B1 B2 B3");
    EXPECT_EQ(text(spec, 2), "F0 B0 F1 B1 F2 B2 F3 B3");
    spec.schedule = PipelineSchedule::zb_h1;
    EXPECT_EQ(text(spec, 0), "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3");
    EXPECT_EQ(text(spec, 2), "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3");
    spec = {.schedule = PipelineSchedule::interleaved, .stages = 2, .virtual_stages = 2, .micro_batches = 4};
    EXPECT_EQ(text(spec, 0), "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3");
    EXPECT_EQ(text(spec, 1), "F0 F1 F0' B0' F1' B1' F2 B0 F3 B1 F2' B2' F3' B3' B2 B3");
    spec = {
        .schedule = PipelineSchedule::breadth_first, .stages = 2, .virtual_stages = 2, .micro_batches = 3};
    EXPECT_EQ(text(spec, 0), "F0 F1 F2 F0' F1' F2' B0' B1' B2' B0 B1 B2");
    EXPECT_EQ(text(spec, 1), text(spec, 0));
}

TEST(Pipeline, OneStageIsOneProcess) {
    for (const PipelineSchedule schedule : all_pipeline_schedules) {
        const PipelineSpec spec{.schedule = schedule,
                                .virtual_stages = schedule == PipelineSchedule::interleaved ||
                                                          schedule == PipelineSchedule::breadth_first
                                                      ? 3
                                                      : 1,
                                .micro_batches = 5};
        EXPECT_NO_THROW(check_passes(spec, pipeline_passes(spec)));
        const Timeline timeline = simulate(spec, pipeline_passes(spec), equal_times(spec, {1, 1, 1, 100}));
        EXPECT_EQ(timeline.idle(0), 0) << text_of(spec) << ": nothing is sent";
    }
}

// ---- the simulation

TEST(PipelineSimulation, UnevenChunksAndTransfers) {
    // Two stages, one micro-batch: forward 2, sent for 5, forward 3, backward 10, sent for 7, backward 1 + 4.
    const PipelineSpec spec{.stages = 2};
    const Timeline timeline = simulate(spec, pipeline_passes(spec), {{2, 1, 4, 5}, {3, 6, 4, 7}});
    ASSERT_EQ(timeline.spans.size(), 4U);
    for (const Span& span : timeline.spans) {
        const bool is_forward = span.pass.kind == PassKind::forward;
        EXPECT_EQ(span.begin, span.stage == 0 ? (is_forward ? 0 : 27) : (is_forward ? 7 : 10))
            << to_string(span.pass);
    }
    EXPECT_EQ(timeline.total(), 2 + 5 + 3 + 10 + 7 + 5);
    EXPECT_EQ(timeline.work(0), 7);
    EXPECT_EQ(timeline.work(1), 13);
    EXPECT_EQ(timeline.idle(1), 32 - 13);
}

TEST(PipelineSimulation, TransfersHideBehindComputation) {
    // GPipe: only the fill and the drain wait for transfers, once for each boundary and direction.
    const PipelineSpec spec{.schedule = PipelineSchedule::gpipe, .stages = 4, .micro_batches = 6};
    const Timeline timeline = simulate(spec, pipeline_passes(spec), equal_times(spec, {4, 4, 4, 3}));
    EXPECT_EQ(timeline.total(), (6 + 3) * 12 + 2 * 3 * 3);
}

TEST(PipelineSimulation, MeasuredTimesBeginAnywhere) {
    Timeline timeline{2, 1, {}};
    timeline.spans.push_back({0, {PassKind::forward, 0, 0}, 100, 101});
    timeline.spans.push_back({1, {PassKind::forward, 1, 0}, 102, 104});
    EXPECT_EQ(timeline.begin(), 100);
    EXPECT_EQ(timeline.total(), 4);
    EXPECT_EQ(timeline.idle(0), 3);
}

// ---- wrong settings of a user

void expect_refused(const PipelineSpec& spec, int layers, const std::string& message) {
    try {
        check_chunks(spec, layers);
        ADD_FAILURE() << "not refused: " << text_of(spec);
    } catch (const UserError& fault) {
        EXPECT_NE(std::string(fault.what()).find(message), std::string::npos) << fault.what();
    }
}

TEST(CheckChunks, SaysWhatWouldFit) {
    expect_refused({.stages = 0}, 6, "give 1 or more");
    expect_refused({.stages = 2, .virtual_stages = 0}, 6, "give 1 or more");
    expect_refused({.stages = 2, .virtual_stages = 2}, 6, "try --pipeline-schedule interleaved");
    PipelineSpec spec{
        .schedule = PipelineSchedule::interleaved, .stages = 4, .virtual_stages = 4, .micro_batches = 8};
    expect_refused(spec, 12, "try --virtual-stages 3");
    expect_refused(spec, 5, "try --pipeline-schedule 1f1b");
    spec.virtual_stages = 2;
    EXPECT_NO_THROW(check_chunks(spec, 12));
    spec.virtual_stages = 1;
    expect_refused(spec, 12, "--virtual-stages 2 or more");
    spec.virtual_stages = 1 << 30;
    expect_refused(spec, 12, "try --virtual-stages 3");
}

// ---- faults, planted in sound lists

constexpr PipelineSpec one_f_one_b{.stages = 3, .micro_batches = 4};
constexpr PipelineSpec zb_h1{.schedule = PipelineSchedule::zb_h1, .stages = 3, .micro_batches = 4};

std::ptrdiff_t place_of(const std::vector<Pass>& passes, const Pass& pass) {
    return std::ranges::find(passes, pass) - passes.begin();
}

void expect_fault(const PipelineSpec& spec, const std::string& message,
                  const std::function<void(Passes&)>& plant) {
    Passes passes = pipeline_passes(spec);
    plant(passes);
    try {
        check_passes(spec, passes);
        ADD_FAILURE() << "not found: " << message;
    } catch (const ProgrammingError& fault) {
        EXPECT_NE(std::string(fault.what()).find(message), std::string::npos) << fault.what();
    }
}

TEST(CheckPasses, FindsWhatIsMissingTwiceOrForeign) {
    expect_fault(one_f_one_b, "not one list", [](Passes& passes) { passes.pop_back(); });
    expect_fault(one_f_one_b, "stage 1 lacks backward of micro-batch 3, chunk 1",
                 [](Passes& passes) { passes[1].pop_back(); });
    expect_fault(one_f_one_b, "(forward of micro-batch 1, chunk 0) comes before that of an earlier",
                 [](Passes& passes) { passes[0].erase(passes[0].begin()); });
    expect_fault(one_f_one_b, "comes a second time",
                 [](Passes& passes) { passes[2].push_back(passes[2].back()); });
    expect_fault(one_f_one_b, "of a chunk of another stage",
                 [](Passes& passes) { std::swap(passes[0], passes[1]); });
    for (const int chunk : {-1, 3, 100})
        expect_fault(one_f_one_b, "of a chunk of another stage",
                     [&](Passes& passes) { passes[0][0].chunk = chunk; });
    for (const int micro_batch : {-1, 4})
        expect_fault(one_f_one_b, "that is not there",
                     [&](Passes& passes) { passes[0][0].micro_batch = micro_batch; });
    expect_fault(one_f_one_b, "of a kind that the schedule does not have",
                 [](Passes& passes) { passes[0].back().kind = PassKind::backward_input; });
    expect_fault(zb_h1, "of a kind that the schedule does not have",
                 [](Passes& passes) { passes[0].back().kind = PassKind::backward; });
    expect_fault(zb_h1, "lacks backward-weight of micro-batch 3, chunk 2",
                 [](Passes& passes) { passes[2].pop_back(); });
}

TEST(CheckPasses, FindsAWrongOrder) {
    expect_fault(one_f_one_b, "before that of an earlier micro-batch",
                 [](Passes& passes) { std::swap(passes[0].back(), passes[0][passes[0].size() - 2]); });
    expect_fault(one_f_one_b, "is a backward pass before its forward pass",
                 [](Passes& passes) { std::swap(passes[2][0], passes[2][1]); });
    expect_fault(zb_h1, "makes weight gradients before the gradient of its input", [](Passes& passes) {
        auto& last = passes[0];
        std::swap(last[last.size() - 1], last[last.size() - 2]);
    });
    // Weight parts directly after their input parts hold less; weight parts at the end hold more.
    expect_fault(zb_h1, "holds more than the activations of 3 passes", [](Passes& passes) {
        auto& last = passes[2];
        const auto weight = last.begin() + place_of(last, {PassKind::backward_weight, 2, 0});
        std::rotate(weight, weight + 1, weight + 2);
    });
    expect_fault(one_f_one_b, "holds more than the activations of 2 passes",
                 [](Passes& passes) { std::swap(passes[1][2], passes[1][3]); });
}

TEST(CheckPasses, FindsPassesThatWaitForEver) {
    // Stage 0 runs the backward pass of a micro-batch before it has sent the one that stage 1 runs first.
    expect_fault(one_f_one_b,
                 "stage 0, pass 1 (backward of micro-batch 0, chunk 0) waits for ever for the backward of "
                 "micro-batch 0, chunk 1",
                 [](Passes& passes) {
                     auto& first = passes[0];
                     const auto back = first.begin() + place_of(first, {PassKind::backward, 0, 0});
                     std::rotate(first.begin() + 1, back, back + 1);
                 });
    const PipelineSpec interleaved{
        .schedule = PipelineSchedule::interleaved, .stages = 2, .virtual_stages = 2, .micro_batches = 2};
    Passes passes = pipeline_passes(interleaved);
    std::swap(passes[0][1], passes[0][2]);
    std::swap(passes[1][0], passes[1][1]);
    EXPECT_THROW(check_passes(interleaved, passes), ProgrammingError);
    passes = pipeline_passes(one_f_one_b);
    passes[1].clear();
    EXPECT_THROW(simulate(one_f_one_b, passes, equal_times(one_f_one_b, {1, 1, 1})), ProgrammingError);
}

// The figures of docs/planner.md: 32 layers on four stages, forward and backward one unit of time a layer.
TEST(Lessons, PipelinesIdle) {
    struct Lesson {
        int micro_batches;
        double total, idle;
    };
    const std::vector<PassTimes> times(4, PassTimes{.forward = 8, .backward_input = 8});
    for (const auto& [micro_batches, total, idle] :
         {Lesson{1, 64, 0.75}, Lesson{4, 112, 0.429}, Lesson{8, 176, 0.273}, Lesson{16, 304, 0.158},
          Lesson{32, 560, 0.086}}) {
        for (const PipelineSchedule schedule : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b}) {
            const PipelineSpec spec{.schedule = schedule, .stages = 4, .micro_batches = micro_batches};
            const Timeline timeline = simulate(spec, pipeline_passes(spec), times);
            EXPECT_EQ(timeline.total(), total);
            EXPECT_NEAR(1 - timeline.work(0) / timeline.total(), idle, 0.0005);
            const bool holds_all = schedule == PipelineSchedule::gpipe;
            EXPECT_EQ(timeline.peak_in_flight(0), holds_all ? micro_batches : std::min(micro_batches, 4));
        }
    }
    const PipelineSpec naive{.schedule = PipelineSchedule::naive, .stages = 4, .micro_batches = 8};
    const Timeline timeline = simulate(naive, pipeline_passes(naive), times);
    EXPECT_EQ(timeline.work(0) / timeline.total(), 0.25);
}

}  // namespace
}  // namespace llmc
