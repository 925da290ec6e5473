#include "llmc/train/command_line.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <system_error>
#include <vector>

#include "llmc/comm/bootstrap.h"
#include "llmc/comm/launcher.h"
#include "llmc/io/export_folder.h"
#include "llmc/train/prepared_run.h"
#include "llmc/train/report.h"
#include "llmc/train/resume.h"

namespace llmc {

namespace {

namespace fs = std::filesystem;

std::string_view environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

std::string_view last_part(std::string_view path) { return path.substr(path.rfind('/') + 1); }

std::vector<std::string_view> lines_of(std::string_view text) {
    std::vector<std::string_view> lines;
    for (std::size_t end = text.find('\n'); end != std::string_view::npos; end = text.find('\n')) {
        lines.push_back(text.substr(0, end));
        text.remove_prefix(end + 1);
    }
    return lines;
}

// The command line of the parent process if that is mpirun, in the form of TRAIN_GPT_LAUNCHED. On other
// machines than mpirun's own, the parent is a daemon and the result is empty.
std::string launched_by_mpirun() {
    std::ifstream file(fmt::format("/proc/{}/cmdline", getppid()));
    std::string words;
    for (std::string word; std::getline(file, word, '\0');) {
        if (words.empty() && !last_part(word).starts_with("mpirun") &&
            !last_part(word).starts_with("mpiexec"))
            return {};
        words += shell_word(word) + "\n";
    }
    return words;
}

}  // namespace

std::string shell_word(std::string_view word) {
    constexpr std::string_view plain =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789%+,-./:=@_";
    if (!word.empty() && word.find_first_not_of(plain) == std::string_view::npos) return std::string(word);
    std::string quoted = "'";
    for (const char c : word) {
        if (c == '\'') {
            quoted += "'\\''";
        } else {
            quoted += c;
        }
    }
    return quoted + "'";
}

std::string program_as_called(std::span<const char* const> arguments, std::string_view launched,
                              int processes) {
    const std::string program = shell_word(arguments[0]);
    // The launcher's command line ends with this program's own, unless the launcher runs a script that calls
    // it.
    const std::vector<std::string_view> words = lines_of(launched);
    if (words.size() > arguments.size()) {
        const auto ours = words.end() - std::ssize(arguments);
        if (last_part(*ours) == last_part(program)) {
            return fmt::format("{} {}", fmt::join(words.begin(), ours, " "), program);
        }
    }
    return processes > 0 ? fmt::format("mpirun -np {} {}", processes, program) : program;
}

std::string program_as_called(std::span<const char* const> arguments) {
    const auto variable = [](const char* name) { return std::getenv(name); };
    if (started_by_launcher(variable)) {
        return fmt::format("{} --{} {}", shell_word(arguments[0]), processes_option,
                           environment("WORLD_SIZE"));
    }
    const std::string processes(environment("OMPI_COMM_WORLD_SIZE"));
    std::string launched(environment("TRAIN_GPT_LAUNCHED"));
    if (launched.empty() && !processes.empty()) launched = launched_by_mpirun();
    return program_as_called(arguments, launched,
                             static_cast<int>(std::strtol(processes.c_str(), nullptr, 10)));
}

namespace {

std::string command_to_resume(const PreparedRun& run) {
    return fmt::format("{} --config {} --out-dir {} --resume", run.session.program(),
                       shell_word((run.out_dir / "config.toml").string()), shell_word(run.out_dir.string()));
}

// A run of no steps does not change which base a checkpoint names.
std::string place_of_base(const PreparedRun& run) {
    const Options& options = run.options;
    const bool is_elsewhere = options.has_adapters() && options.steps == 0 && options.given.contains("init");
    return is_elsewhere ? " --init " + shell_word(options.init) : "";
}

}  // namespace

std::string command_to_export(const PreparedRun& run, const std::filesystem::path& checkpoint) {
    if (checkpoint.empty()) return "";
    const Options& options = run.options;
    return fmt::format("{} {}{} --steps 0 --export {}{}{}", command_to_resume(run),
                       shell_word(checkpoint.string()), place_of_base(run), shell_word(options.export_file),
                       options.export_dtype.empty() ? "" : " --export-dtype " + options.export_dtype,
                       options.merge.empty() ? "" : " --merge " + options.merge);
}

std::vector<Suggestion> suggestions(const PreparedRun& run, const Outcome& outcome) {
    if (outcome.checkpoint.empty() || (outcome.stopped && !run.trains)) return {};
    const std::string go_on = command_to_resume(run);
    if (outcome.stopped || outcome.last_step < run.options.steps) return {{"go on with", go_on}};
    const fs::path program = run.session.arguments()[0];
    const fs::path plot = (program.parent_path() / "scripts" / "plot.py").lexically_normal();
    const fs::path drawn = run.options.metrics.empty() ? run.out_dir : fs::path(run.options.metrics);
    std::vector<Suggestion> found;
    // With --steps 0 the options say nothing about the run's schedule.
    if (run.options.steps > 0) {
        const std::int64_t applied = run.trainer->progress().applied(), steps = 2 * outcome.last_step;
        // An exported folder is always a new one.
        const std::string& exported = run.options.export_file;
        const fs::path without_slash = fs::path(exported + "/").parent_path();
        const std::string other_folder =
            is_folder_name(exported)
                ? " --export " + shell_word(fmt::format("{}-{}", without_slash.string(), steps))
                : "";
        found.push_back({"go on with", fmt::format("{} --steps {}{}{}", go_on, steps, other_folder,
                                                   options_that_keep_rate(run.options, applied))});
    }
    const bool talks = run.tokenizer && run.data.training && !run.data.training->rows().empty();
    found.push_back(
        {talks ? "talk to the model with" : "generate text with",
         fmt::format("{} --{} --resume {}{}", shell_word(program.string()), talks ? "chat" : "generate",
                     shell_word(run.out_dir.string()), place_of_base(run))});
    std::error_code ignored;
    if (fs::exists(plot, ignored)) {  // the program may have been copied elsewhere
        found.push_back({"draw the loss with",
                         fmt::format("{} {}", shell_word(plot.string()), shell_word(drawn.string()))});
    }
    return found;
}

}  // namespace llmc
