#include "llmc/planner/configure.h"

#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <istream>
#include <optional>
#include <string_view>
#include <variant>

#include "llmc/core/error.h"
#include "llmc/planner/planned_run.h"

namespace llmc {

namespace {

namespace fs = std::filesystem;

class Questions {
  public:
    Questions(std::istream& answers, Console& console, std::string program)
        : answers_(answers), console_(console), arguments_{std::move(program)} {}

    // Asks until the plan's command line takes the answer as the value of the option, and returns it. An empty answer
    // is the default; an empty default leaves the option out.
    std::string ask(std::string_view question, std::string_view option, std::string_view by_default) {
        for (;;) {
            console_.text(fmt::format("{} [{}]: ", question, by_default.empty() ? "none" : by_default));
            std::string answer;
            if (!std::getline(answers_, answer)) {
                console_.text("\n");
                user_error(
                    "configure: the answers end before the last question; answer all, or give options to "
                    "plan");
            }
            const std::size_t begin = answer.find_first_not_of(" \t\r");
            answer = begin == std::string::npos
                         ? std::string(by_default)
                         : answer.substr(begin, answer.find_last_not_of(" \t\r") + 1 - begin);
            if (answer.empty() || takes(fmt::format("--{}={}", option, answer))) return answer;
        }
    }

    void add(const std::string& argument) { arguments_.push_back(argument); }
    const std::vector<std::string>& arguments() const { return arguments_; }

  private:
    bool takes(const std::string& argument) {
        arguments_.push_back(argument);
        try {
            PlannedRun run;
            std::string text;
            read(run, arguments_, text);
            if (run.options.steps < 1)
                user_error("--steps {} trains nothing; give 1 or more", run.options.steps);
            const auto& context =
                std::get<std::optional<std::int64_t>>(run.options.model_options.find("seq-len")->second);
            if (context.value_or(1) < 1) user_error("--seq-len {} is no context; give 1 or more", *context);
            if (run.described)
                user_error("--model {} is planned here, not trained; give another", run.described->name);
            const std::string& data = run.options.train_data;
            if (data.find_first_of("*?[") == std::string::npos && !data.empty() && !fs::exists(data))
                user_error("--train-data {}: there is no such file; give another name", data);
            const std::string& file = run.asked.config;
            if (!file.empty() && fs::exists(file))
                user_error("--write-config {}: there is such a file; choose another name", file);
            const fs::path folder = fs::path(file).parent_path();
            if (!folder.empty() && !fs::is_directory(folder))
                user_error("--write-config {}: there is no folder {}; choose another", file, folder.string());
            return true;
        } catch (const UserError& fault) {
            console_.text(fmt::format("  {}\n", fault.what()));
            arguments_.pop_back();
            return false;
        }
    }

    std::istream& answers_;
    Console& console_;
    std::vector<std::string> arguments_;
};

}  // namespace

std::vector<std::string> ask_for_plan(const std::string& program, std::istream& answers, Console& console) {
    console.text("Enter takes the answer in brackets.\n");
    Questions questions(answers, console, program);
    questions.ask("Model: a name, such as gpt2 or llama3-8b, or a folder in Hugging Face's format", "model",
                  "gpt2");
    questions.ask("Training data: a text, or token shards 'PATTERN*.bin'; none: generated stories",
                  "train-data", "");
    questions.ask("Context in tokens; none: that of the model", "seq-len", "");
    questions.ask("Steps", "steps", "1200");
    if (questions.ask("GPUs in all; none: processors", "gpus", "").empty()) {
        questions.ask("Processes on this machine", "processes", "1");
    } else {
        questions.ask("Kind of GPU, such as A100, H100 or 4090", "gpu", "H100");
        questions.ask("Tokens in a step", "global-batch-tokens", "524288");
        questions.add("--search");
    }
    questions.ask("File for the configuration", "write-config", "config.toml");
    return questions.arguments();
}

}  // namespace llmc
