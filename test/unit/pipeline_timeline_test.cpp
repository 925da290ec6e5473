// Drawings of pipelines: the chart in the terminal, a picture that is sound XML with every pass in its place,
// and a trace whose events are the passes.
#include "llmc/timeline/pipeline_timeline.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

namespace llmc {
namespace {

Timeline timeline_of(const PipelineSpec& spec, const PassTimes& times) {
    return simulate(spec, pipeline_passes(spec), equal_times(spec, times));
}

// Timelines of every schedule, some with room for numbers and some without.
std::vector<Timeline> some_timelines() {
    std::vector<Timeline> all;
    for (const PipelineSchedule schedule : all_pipeline_schedules)
        for (const int p : {1, 2, 4, 12})
            for (const int groups : {1, 5})
                all.push_back(
                    timeline_of({.schedule = schedule,
                                 .stages = p,
                                 .virtual_stages = schedule == PipelineSchedule::interleaved ? 3 : 1,
                                 .micro_batches = groups * p},
                                {.forward = 1e-3,
                                 .backward_input = 1.3e-3,
                                 .backward_weight = 0.9e-3,
                                 .communication = 1e-5}));
    all.emplace_back();
    all.push_back(timeline_of({.stages = 2}, {}));  // with no duration
    return all;
}

std::string without_colours(const std::string& text) {
    return std::regex_replace(text, std::regex("\x1b\\[[0-9;]*m"), "");
}

// The background colours of a row's passes, and how often each occurs.
std::map<std::string, int> backgrounds_of(const std::string& row) {
    std::map<std::string, int> colours;
    const std::regex colour("\x1b\\[38;5;[0-9]+;48;5;([0-9]+)m");
    for (auto found = std::sregex_iterator(row.begin(), row.end(), colour); found != std::sregex_iterator();
         ++found)
        ++colours[(*found)[1]];
    return colours;
}

std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = text.find('\n', at);
        lines.push_back(text.substr(at, end - at));
        at = end + 1;
    }
    return lines;
}

// ---- the chart

TEST(PipelineChart, LooksLikeThis) {
    const Timeline fused =
        timeline_of({.stages = 2, .micro_batches = 3}, {.forward = 2, .backward_input = 4});
    EXPECT_EQ(timeline_chart(fused, "1f1b", 56, false),
              "1f1b\n"
              "stage 0 F0--F1--........B0======F2--B1======....B2======\n"
              "stage 1 ....F0--B0======F1--B1======F2--B2======........\n"
              "        0                                         24.0 s\n"
              "F0- forward   B0= backward   ... idle\n"
              "0 1 2 micro-batches\n"
              "bubble: 25.0% of all time, 33.3% of the useful time\n"
              "activations held at most, stage by stage: 2, 1\n"
              "micro-batches\n");
}

// Chunks differ by the case and fill of their letters, or by colours. The legend has them all.
TEST(PipelineChart, ChunksAreToldApart) {
    const Timeline timeline = timeline_of(
        {.schedule = PipelineSchedule::interleaved, .stages = 2, .virtual_stages = 3, .micro_batches = 4},
        {.forward = 3, .backward_input = 4});
    const int columns = 8 + static_cast<int>(timeline.total());
    const std::string chart = timeline_chart(timeline, "", columns, false);
    const std::vector<std::string> lines = lines_of(chart);
    const std::vector<std::string> forward = {"F-", "f-", "F:"}, backward = {"B==", "b==", "B##"};
    for (const Span& span : timeline.spans) {
        std::string cell =
            (span.pass.kind == PassKind::forward ? forward
                                                 : backward)[static_cast<std::size_t>(span.pass.chunk / 2)];
        cell.insert(1, std::to_string(span.pass.micro_batch));
        EXPECT_EQ(lines[static_cast<std::size_t>(span.stage) + 1].substr(
                      8 + static_cast<std::size_t>(span.begin), cell.size()),
                  cell);
    }
    EXPECT_NE(chart.find("F0- f0- F0: forward"), std::string::npos) << chart;
    EXPECT_NE(chart.find("B0= b0= B0# backward"), std::string::npos) << chart;
    EXPECT_NE(chart.find("chunks of a stage in their order"), std::string::npos) << chart;
    // The passes of three chunks, of two kinds, each in two shades.
    EXPECT_EQ(backgrounds_of(lines_of(timeline_chart(timeline, "", columns, true))[1]).size(), 2U * 3 * 2);
}

// Counted in micro-batches of the whole stage, as in the picture.
TEST(PipelineChart, SaysWhatStagesHold) {
    for (const Timeline& timeline : some_timelines()) {
        std::string chart = timeline_chart(timeline, "title", 100, false), expected;
        std::ranges::replace(chart, '\n', ' ');
        for (int stage = 0; stage < timeline.stages; ++stage)
            expected += fmt::format("{}{:.3g}", stage > 0 ? ", " : ": ", timeline.peak_in_flight(stage));
        EXPECT_NE(chart.find("held at most, stage by stage" + expected + " micro-batches "),
                  std::string::npos)
            << chart;
    }
}

TEST(PipelineChart, KeepsToItsWidth) {
    for (const Timeline& timeline : some_timelines()) {
        for (const int columns : {60, 100, 237}) {
            const std::vector<std::string> plain =
                lines_of(timeline_chart(timeline, "title", columns, false));
            const std::vector<std::string> coloured =
                lines_of(without_colours(timeline_chart(timeline, "title", columns, true)));
            ASSERT_GE(plain.size(), static_cast<std::size_t>(timeline.stages) + 4);
            for (const auto& lines : {plain, coloured}) {
                for (const std::string& line : lines)
                    EXPECT_LE(line.size(), static_cast<std::size_t>(columns)) << line;
            }
            for (std::size_t stage = 0; stage < static_cast<std::size_t>(timeline.stages); ++stage)
                EXPECT_EQ(plain[stage + 1].size(), static_cast<std::size_t>(columns));
        }
        EXPECT_NO_THROW(timeline_chart(timeline, "", 0, false));
        EXPECT_NO_THROW(timeline_chart(timeline, "", -1, true));
    }
}

TEST(PipelineChart, AColumnIsAShareOfTheTime) {
    const Timeline timeline =
        timeline_of({.schedule = PipelineSchedule::zb_h1, .stages = 3, .micro_batches = 5}, {3, 5, 2});
    const auto total = static_cast<int>(timeline.total());
    const std::vector<std::string> lines = lines_of(timeline_chart(timeline, "", 8 + total, false));
    for (const Span& span : timeline.spans) {
        const std::string& line = lines[static_cast<std::size_t>(span.stage) + 1];
        const auto begin = static_cast<std::size_t>(span.begin), end = static_cast<std::size_t>(span.end);
        const bool is_forward = span.pass.kind == PassKind::forward,
                   is_weight = span.pass.kind == PassKind::backward_weight;
        std::string cell = fmt::format("{}{}",
                                       is_forward  ? 'F'
                                       : is_weight ? 'W'
                                                   : 'B',
                                       span.pass.micro_batch);
        cell.resize(end - begin, is_forward ? '-' : is_weight ? '~' : '=');
        EXPECT_EQ(line.substr(8 + begin, end - begin), cell);
    }
    const auto idle = std::ranges::count(lines[1], '.');
    EXPECT_EQ(static_cast<double>(idle), timeline.idle(0));
}

TEST(PipelineChart, ANumberIsWholeOrNotThere) {
    const Timeline timeline = timeline_of({.schedule = PipelineSchedule::gpipe, .micro_batches = 12},
                                          {.forward = 1, .backward_input = 2});
    const std::string plain = lines_of(timeline_chart(timeline, "", 8 + 72, false))[1];
    EXPECT_EQ(plain, "stage 0 F0F1F2F3F4F5F6F7F8F9F-F-B0==B1==B2==B3==B4==B5==B6==B7==B8==B9==B10=B11=");
    const std::string coloured = lines_of(without_colours(timeline_chart(timeline, "", 8 + 36, true)))[1];
    EXPECT_EQ(coloured, "stage 0 0123456789  0 1 2 3 4 5 6 7 8 9 1011");
}

TEST(PipelineChart, ColoursTellKindsAndNeighboursApart) {
    const Timeline timeline =
        timeline_of({.schedule = PipelineSchedule::zb_h1, .stages = 1, .micro_batches = 2}, {1, 1, 1});
    const std::string row = lines_of(timeline_chart(timeline, "", 68, true))[1];
    EXPECT_EQ(backgrounds_of(row).size(), 6U) << "two shades of each of three kinds";
}

// ---- the picture

// Whether a text is one XML element with all tags closed in order, and without characters that must be
// escaped.
void expect_sound_xml(const std::string& text) {
    const std::regex tag("<(/?)([a-z]+)((?: [a-zA-Z:-]+=\"[^\"<&]*\")*)(/?)>|&(amp|lt|gt|quot);|[<&]");
    std::vector<std::string> open;
    int roots = 0;
    for (auto found = std::sregex_iterator(text.begin(), text.end(), tag); found != std::sregex_iterator();
         ++found) {
        const std::smatch& match = *found;
        if (match[5].matched) continue;
        ASSERT_TRUE(match[2].matched) << text.substr(static_cast<std::size_t>(match.position()), 80);
        if (match[1].length() > 0) {
            ASSERT_FALSE(open.empty());
            ASSERT_EQ(open.back(), match[2]);
            open.pop_back();
        } else {
            if (open.empty()) ++roots;
            if (match[4].length() == 0) open.push_back(match[2]);
        }
    }
    EXPECT_TRUE(open.empty());
    EXPECT_EQ(roots, 1);
}

TEST(PipelinePicture, IsSoundAndHasEveryPass) {
    for (const Timeline& timeline : some_timelines()) {
        const std::string picture = timeline_svg(timeline, "a < b & c > d");
        expect_sound_xml(picture);
        EXPECT_NE(picture.find("a &lt; b &amp; c &gt; d"), std::string::npos);
        EXPECT_EQ(picture.find("nan"), std::string::npos);
        EXPECT_EQ(picture.find("inf"), std::string::npos);
        std::size_t at = 0;
        for (const Span& span : timeline.spans) {
            at = picture.find(fmt::format("<title>stage {}: {}; ", span.stage, to_string(span.pass)), at);
            ASSERT_NE(at, std::string::npos);
        }
    }
}

TEST(PipelinePicture, PassesLieOnTheAxisWithoutOverlap) {
    for (const Timeline& timeline : some_timelines()) {
        const std::string picture = timeline_svg(timeline, "");
        const std::regex pass("<rect x=\"([0-9.]+)\" y=\"([0-9.]+)\" width=\"([0-9.]+)\" [^>]*><title>stage");
        std::map<std::string, double> ends;
        std::size_t passes = 0;
        for (auto found = std::sregex_iterator(picture.begin(), picture.end(), pass);
             found != std::sregex_iterator(); ++found, ++passes) {
            const double x = std::stod((*found)[1]), width = std::stod((*found)[3]);
            double& end = ends[(*found)[2]];
            EXPECT_GE(x, end - 0.011) << "they have two decimals";
            end = x + width;
        }
        EXPECT_EQ(passes, timeline.spans.size());
        const int stages = passes > 0 ? timeline.stages : 0;
        EXPECT_EQ(ends.size(), static_cast<std::size_t>(stages));
    }
}

TEST(PipelinePicture, IsAsWideAsItsTitle) {
    const Timeline timeline = timeline_of({.stages = 2, .micro_batches = 2}, {.forward = 1});
    const auto width = [&](std::size_t letters) {
        const std::string picture = timeline_svg(timeline, std::string(letters, 'a'));
        std::smatch found;
        EXPECT_TRUE(std::regex_search(picture, found, std::regex("^<svg [^>]* width=\"([0-9]+)\"")));
        return std::stoi(found[1]);
    };
    EXPECT_EQ(width(1), width(60));
    EXPECT_GT(width(200), 200 * 8);
}

// ---- the trace

TEST(PipelineTrace, EventsAreThePasses) {
    for (Timeline& timeline : some_timelines()) {
        for (Span& span : timeline.spans) {  // a measured one can begin at any time
            span.begin += 1000;
            span.end += 1000;
        }
        const nlohmann::json trace = nlohmann::json::parse(timeline_trace(timeline, "a \"title\""));
        std::vector<nlohmann::json> passes;
        std::map<int, std::string> threads;
        std::string process;
        for (const nlohmann::json& event : trace.at("traceEvents")) {
            if (event.at("ph") == "X") passes.push_back(event);
            if (event.at("name") == "thread_name") threads[event.at("tid")] = event.at("args").at("name");
            if (event.at("name") == "process_name") process = event.at("args").at("name");
        }
        EXPECT_EQ(process, "a \"title\"");
        EXPECT_EQ(threads.size(), static_cast<std::size_t>(timeline.stages));
        EXPECT_EQ(threads.at(1), "stage 0");
        ASSERT_EQ(passes.size(), timeline.spans.size());
        for (std::size_t i = 0; i < passes.size(); ++i) {
            const Span& span = timeline.spans[i];
            EXPECT_EQ(passes[i].at("name"),
                      fmt::format("{} {}", name_of(span.pass.kind), span.pass.micro_batch));
            EXPECT_EQ(passes[i].at("tid"), span.stage + 1);
            EXPECT_EQ(passes[i].at("pid"), 1);
            EXPECT_EQ(passes[i].at("args").at("chunk"), span.pass.chunk);
            // Times near 1000 s have an error of 1e-13 s.
            EXPECT_NEAR(passes[i].at("ts"), (span.begin - timeline.begin()) * 1e6, 1e-6);
            EXPECT_NEAR(passes[i].at("dur"), (span.end - span.begin) * 1e6, 1e-6);
        }
        const Bubble found = bubble(timeline);
        EXPECT_EQ(trace.at("otherData").at("bubble_idle_over_total"), found.over_total);
        const nlohmann::json& held = trace.at("otherData").at("peak_micro_batches_in_flight");
        ASSERT_EQ(held.size(), static_cast<std::size_t>(timeline.stages));
        for (int stage = 0; stage < timeline.stages; ++stage)
            EXPECT_EQ(held.at(static_cast<std::size_t>(stage)), timeline.peak_in_flight(stage));
    }
}

}  // namespace
}  // namespace llmc
