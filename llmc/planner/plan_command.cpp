#include "llmc/planner/plan_command.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "llmc/comm/bootstrap.h"
#include "llmc/comm/transport.h"
#include "llmc/core/error.h"
#include "llmc/core/standard_streams.h"
#include "llmc/io/files.h"
#include "llmc/planner/changes.h"
#include "llmc/planner/configure.h"
#include "llmc/planner/foreign_options.h"
#include "llmc/planner/levers.h"
#include "llmc/planner/measured.h"
#include "llmc/planner/plan_report.h"
#include "llmc/planner/planned_run.h"
#include "llmc/planner/search.h"
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

void require_new(const std::string& file) {
    if (std::filesystem::exists(file))
        user_error("--write-config {}: there is such a file; choose another name, or remove it", file);
}

// The options of the run, as a configuration file. HYBRID_SHARD's groups are those of this run's machines.
void write_config(PlannedRun& run) {
    const std::string& file = run.asked.config;
    if (run.options.shards_on_machine) run.options.given.insert("zero-shard-size");
    if (run.command.empty()) {
        run.notes.push_back(fmt::format("{} was not written, since no such run can start", file));
        return;
    }
    naming_option("--write-config", [&] { write_file(file, to_toml(run.options)); });
    run.notes.push_back(fmt::format("{0} has the options of the run; --config {0} reads them", file));
}

int plan(Console& console, const ForeignOptions& foreign) {
    std::vector<std::string> arguments = foreign.arguments;
    std::string text, measured;
    PlannedRun given;
    std::optional<PlannedRun> run;
    if (read(given, arguments, text)) {
        require_new(given.asked.config);
        if (!given.asked.measured.empty() && !given.asked.measured_ratio())
            arguments.push_back(fmt::format("--measured=x{}", measured_ratio(arguments, given, measured)));
        run = given.asked.search ? searched_run(arguments) : explained_run(arguments, text);
    }
    if (run) run->notes.insert(run->notes.begin(), foreign.notes.begin(), foreign.notes.end());
    if (run && !measured.empty()) run->notes.push_back("--measured: " + measured);
    if (run && run->asked.levers && run->needs) run->levers = levers_of(*run);
    if (run && !run->asked.config.empty()) write_config(*run);
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

// The rank that a launcher gave this process; 0 without one. Only rank 0 prints.
bool is_rank_zero() {
    for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "RANK", "SLURM_PROCID"})
        if (const char* const rank = std::getenv(name)) return std::string_view(rank) == "0";
    return true;
}

// The number of processes of a launcher's job; none without one.
std::optional<std::string> launched_processes() {
    for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "SLURM_NTASKS"})
        if (const char* const size = std::getenv(name)) return size;
    return std::nullopt;
}

// Whether a launcher started this process as one of a job.
bool is_in_job() {
    try {
        return how_started([](const char* name) { return std::getenv(name); }, has_mpi()).by !=
               Start::By::itself;
    } catch (const UserError&) {
        return false;
    }
}

bool may_print(std::span<const char* const> words) {
    return std::ranges::any_of(words, [](std::string_view word) {
        return word == "--print-step" || word == "--print-model" || word == "--pipeline-timeline";
    });
}

int failed(const std::string& error) {
    // mpirun complains of a process that ends with an error before it has joined the job.
    if (launched_processes()) Job().fail(error);
    write_error(fmt::format("error: {}\n", error));
    return 1;
}

}  // namespace

std::optional<int> plan_command(int argc, const char* const* argv) {
    const std::span words(argv, static_cast<std::size_t>(argc));
    const auto is_called = [&](std::string_view command) { return argc > 1 && argv[1] == command; };
    const bool asks = is_called("configure"), is_plan = asks || is_called("plan");
    if (!is_plan && (!may_print(words) || is_in_job())) return std::nullopt;
    fill_standard_streams();
    std::vector<std::string> arguments(words.begin(), words.end());
    Console console(is_rank_zero());
    ForeignOptions foreign;
    try {
        if (is_plan) arguments.erase(arguments.begin() + 1);
        if (asks && (arguments.size() > 1 || launched_processes()))
            user_error("configure asks at a terminal: it takes no options, and no launcher starts it");
        if (asks) arguments = ask_for_plan(arguments[0], std::cin, console);
        const auto processes = is_plan ? std::nullopt : launched_processes();
        if (processes) arguments.push_back("--processes=" + *processes);
        foreign = with_foreign_options(std::move(arguments));
        if (is_plan) return plan(console, foreign);
        if (!print_instead_of_run(console, foreign.arguments)) return std::nullopt;
        for (const std::string& note : foreign.notes) console.note(note);
        console.require_written();
        return 0;
    } catch (const UserError& fault) {
        return failed(foreign.with_place(fault.what()));
    } catch (const std::exception& fault) {
        return failed(fault.what());
    }
}

void print_in_job(Session& session) {
    if (!session.is_rank_zero()) return;
    std::vector<std::string> arguments(session.arguments().begin(), session.arguments().end());
    arguments.push_back(fmt::format("--processes={}", session.world().size()));
    print_instead_of_run(session.console(), arguments);
}

}  // namespace llmc
