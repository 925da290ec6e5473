#include "llmc/planner/plan_command.h"

#include <fmt/format.h>

#include <exception>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/standard_streams.h"
#include "llmc/planner/plan_report.h"
#include "llmc/planner/planned_run.h"
#include "llmc/train/console.h"

namespace llmc {

namespace {

constexpr int status_of(Verdict verdict) {
    switch (verdict) {
        case Verdict::fits:
            return 0;
        case Verdict::tight:
            return 3;
        default:
            return 2;
    }
}

int plan(const std::vector<std::string>& arguments) {
    Console console(true);
    std::string text;
    const std::optional<PlannedRun> run = planned_run(arguments, text);
    if (!run) {
        console.text(text);
    } else if (run->asked.json) {
        for (const std::string& note : run->notes) write_error(fmt::format("note: {}\n", note));
        console.text(to_json(*run).dump(2) + "\n");
    } else {
        show(console, *run);
    }
    console.require_written();
    return run ? status_of(run->verdict) : 0;
}

}  // namespace

std::optional<int> plan_command(int argc, const char* const* argv) {
    if (argc < 2 || std::string_view(argv[1]) != "plan") return std::nullopt;
    fill_standard_streams();
    std::vector<std::string> arguments = {argv[0]};
    arguments.insert(arguments.end(), argv + 2, argv + argc);
    try {
        return plan(arguments);
    } catch (const std::exception& fault) {
        write_error(fmt::format("error: {}\n", fault.what()));
        return 1;
    }
}

}  // namespace llmc
