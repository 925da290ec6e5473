#include "llmc/planner/plan_options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/core/text.h"
#include "llmc/planner/conventions.h"
#include "llmc/train/settings.h"

namespace llmc {

namespace {

constexpr double largest = 1e18;

// The text's value; UserError if there is none, or if it is not positive.
double positive(const std::string& name, const std::string& text, const std::optional<double>& value,
                std::string_view example) {
    if (!value) user_error("--{}: '{}' is not {}", name, one_line(text), example);
    if (!(*value > 0 && *value <= largest))
        user_error("--{} {} is out of range; give more than 0, such as {}", name, one_line(text),
                   example.substr(example.rfind(' ') + 1));
    return *value;
}

std::optional<double> number_in(const std::string& text) {
    double number{};
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    const bool is_number = error == std::errc() && rest == text.data() + text.size() && std::isfinite(number);
    return is_number ? std::optional(number) : std::nullopt;
}

// Bytes of a size with a unit, of at least 0: 512 alone would be half a kilobyte.
std::optional<double> size_in(const std::string& text) {
    const auto bytes = parse_bytes(text);
    const bool has_unit = !text.empty() && (std::isalpha(static_cast<unsigned char>(text.back())) != 0);
    return bytes && std::isfinite(*bytes) && (*bytes == 0 || (*bytes > 0 && has_unit)) ? bytes : std::nullopt;
}

void add_plan_options(CLI::App& app, PlanOptions& options) {
    using Parse = std::function<std::optional<double>(const std::string&)>;
    const auto add = [&](const std::string& name, const char* value, const std::string& help,
                         const std::function<void(const std::string& name, const std::string& text)>& take) {
        app.add_option_function<std::string>(
               "--" + name, [=](const std::string& text) { take(name, text); }, as_help(help))
            ->option_text(value)
            ->configurable(false)
            ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)
            ->group("Plan");
    };
    const auto add_number = [&](const char* name, std::optional<double>& to, const char* value,
                                const Parse& parse, std::string_view example, const char* help) {
        add(name, value, help, [&to, parse, example](const std::string& of, const std::string& text) {
            to = positive(of, text, parse(text), example);
        });
    };
    const auto add_text = [&](const char* name, std::string& to, const char* value, const char* help) {
        add(name, value, help, [&to](const std::string& of, const std::string& text) {
            if (text.empty()) user_error("--{}: the name is empty; give one, or leave the option out", of);
            to = text;
        });
    };
    const auto add_whole = [&](const char* name, std::optional<std::int64_t>& to, const char* help) {
        add(name, "N", help, [&to](const std::string& of, const std::string& text) {
            const auto number = whole_number<std::int64_t>(text);
            constexpr std::int64_t most = 1 << 20;
            if (!number || *number < 1 || *number > most)
                user_error("--{} '{}' is not a whole number from 1 to {}", of, one_line(text), most);
            to = number;
        });
    };
    const auto add_choice = [&](const char* name, std::string& to, const std::vector<std::string>& choices,
                                bool has_others, const char* value, const char* help) {
        add(name, value, fmt::format("{}: {}", help, fmt::join(choices, ", ")),
            [&to, choices, has_others](const std::string& of, const std::string& text) {
                const bool is_known = std::ranges::find(choices, text) != choices.end();
                if (!is_known && !(has_others && size_in(text)))
                    user_error("--{}: unknown value '{}'; choose one of: {}{}", of, one_line(text),
                               fmt::join(choices, ", "), has_others ? ", or a size such as 10GB" : "");
                to = text;
            });
    };
    add_text(
        "gpu", options.gpu, "NAME",
        "Plan for this GPU (default: H100 with --gpus or --search, else the CPU); --search compares several: "
        "A100,H100");
    add_whole("gpus", options.gpus, "Plan for N GPUs in all, with a process for each");
    add_whole("processes", options.processes, "Plan for N processes in all: on CPUs, or the same as --gpus");
    add_whole("nodes", options.nodes, "Divide them among N machines (default: 8 GPUs each, of GB200 72)");
    add_number("network", options.network, "N", number_in, "GB/s of a GPU in one direction, such as 50",
               "Network of a GPU in one direction, in GB/s: 50 is 400 Gb/s (default: 50; A100 25)");
    add_number("host-memory", options.host_bytes, "SIZE", size_in, "a size with its unit, such as 512GB",
               "Memory of a machine, such as 2TB (default: on CPUs, what is free on this one)");
    add_number("nvme-size", options.nvme_bytes, "SIZE", size_in, "a size with its unit, such as 2TB",
               "Room on the disks of a machine, such as 2TB, for what is offloaded there");
    add("nvme-speed", "READ,WRITE", "Their speeds together, in GB/s, such as 10,5 (default: 5,2.5)",
        [&options](const std::string& name, const std::string& text) {
            const std::size_t comma = std::min(text.find(','), text.size());
            options.nvme_read = number_in(text.substr(0, comma));
            options.nvme_write = number_in(text.substr(std::min(comma + 1, text.size())));
            if (!options.nvme_read || !options.nvme_write || !(*options.nvme_read > 0) ||
                !(*options.nvme_write > 0))
                user_error("--{} '{}' is not two speeds in GB/s, such as 10,5", name, one_line(text));
        });
    const auto gib_in = [](const std::string& text) {
        constexpr double most = 1e5;
        const auto gib = number_in(text);
        return gib && *gib <= most ? gib : std::nullopt;
    };
    add_number("gpu-memory", options.gpu_gib, "N", gib_in, "GiB of one GPU, such as 79.2",
               "GiB of a GPU that a process sees, in place of the table's");
    add("reserve", "GIB",
        "GiB of a GPU to leave to CUDA's context, NCCL and other programs (default: 1, in searches 2)",
        [&options, gib_in](const std::string& name, const std::string& text) {
            options.reserve_gib = gib_in(text);
            if (!options.reserve_gib || *options.reserve_gib < 0)
                user_error("--{} '{}' is not a number of GiB, such as 2", name, one_line(text));
        });
    add_number("gpu-tflops", options.gpu_tflops, "N", number_in, "TFLOP/s, such as 989",
               "Dense bf16 TFLOP/s of a GPU, in place of the table's");
    add_number("gpu-bandwidth", options.gpu_bandwidth, "N", number_in, "GB/s, such as 3350",
               "GB/s of a GPU's memory, in place of the table's");
    add_number("tokens", options.tokens, "N", parse_count, "a number of tokens, such as 15.6T",
               "Tokens of the whole run, such as 15.6T, for its time and price");
    add_number("price", options.price, "USD", number_in, "dollars, such as 3.5",
               "Dollars for an hour of a GPU (default: A100 2, H100 3.50, H800 2)");
    add_number("speed", options.speed, "N", number_in, "tokens/s, such as 400",
               "Tokens/s of a GPU or process, measured or published, in place of the estimate");
    add("lost", "PERCENT", "Share of the time that failures and the rest take (default: 0)",
        [&options](const std::string& name, const std::string& text) {
            const bool has_sign = text.ends_with('%');
            const auto number = number_in(text.substr(0, text.size() - (has_sign ? 1 : 0)));
            if (!number || *number < 0 || *number >= 1000)
                user_error("--{} '{}' is not a share in percent, such as 13%", name, one_line(text));
            options.lost = *number / 100;
        });
    add_number("parameters", options.parameters, "N", parse_count, "a number of parameters, such as 70B",
               "Plan a nominal size such as 70B, without an architecture, by --memory-convention");
    add_choice("memory-convention", options.convention, convention_names(), false, "NAME",
               "Also count memory by a convention");
    add_choice("convention-activations", options.activations, {"none", "half-weights", "by-layer"}, true,
               "NAME", "Activations by the convention, or a SIZE");
    add_choice("convention-optimizer", options.optimizer, {"adam", "sgd"}, false, "NAME",
               "Optimizer of the convention");
    add_number("days", options.days, "N", number_in, "days, such as 30",
               "With --search and --tokens: find the fewest GPUs that end the run in N days");
    add_text(
        "measured", options.measured, "RUN|SECONDS|xRATIO",
        "Multiply all times by how much longer than planned a measured step took: the median step of a run's "
        "folder, SECONDS of a step of these options, or a known ratio, such as x1.2");
    add_text("from", options.from, "FILE",
             "Take options from a configuration of DeepSpeed (JSON) or Hugging Face Accelerate (YAML); the "
             "command "
             "line overrides them (docs/coming-from.md)");
    add_text("write-config", options.config, "FILE", "Write the run's options to FILE, for --config");
    const auto add_flag = [&](const char* name, bool& to, const char* help) {
        app.add_flag(name, to, as_help(help))->configurable(false)->disable_flag_override()->group("Plan");
    };
    add_flag(
        "--search", options.search,
        "Find the best mesh, ZeRO stage, schedule, recomputation and micro-batch; without --gpus also the "
        "number of GPUs");
    add_flag("--levers", options.levers,
             "Also print the largest micro-batch and context, and what each option would save and cost");
    add_flag("--json", options.json, "Print the plan as one JSON object (docs/interface.md)");
}

}  // namespace

double PlanOptions::reserve() const {
    return reserve_gib.value_or(search ? reserve_of_search : reserve_of_plan);
}

std::optional<double> PlanOptions::measured_seconds() const {
    const auto number = number_in(measured);
    return number && *number > 0 ? number : std::nullopt;
}

std::optional<double> PlanOptions::measured_ratio() const {
    const auto number = measured.starts_with('x') ? number_in(measured.substr(1)) : std::nullopt;
    return number && *number > 0 ? number : std::nullopt;
}

OtherCommand plan_command_line(PlanOptions& options) {
    return {
        .name = "plan",
        .description = "Plan a run without starting it: ./train_gpt plan --model llama3-70b --gpus 64",
        .exit_statuses =
            "  0   the run fits\n"
            "  1   an option has no meaning; one line on standard error says which and why\n"
            "  2   the run does not fit, or no run can have these options: the plan says what would mend it\n"
            "  3   the run fits, but within the last GiB\n",
        .add_options = [&options](CLI::App& app) { add_plan_options(app, options); }};
}

std::vector<std::string> words_of_run(const std::vector<std::string>& arguments) {
    CLI::App app;
    PlanOptions unused;
    add_plan_options(app, unused);
    std::vector<std::string> words;
    for (std::size_t i = 1; i < arguments.size(); ++i) {
        const std::string& word = arguments[i];
        const std::size_t equals = word.find('=');
        const CLI::Option* const option =
            word.starts_with("--") ? app.get_option_no_throw(word.substr(0, equals)) : nullptr;
        if (option == nullptr || option->get_lnames().front() == "help") {
            words.push_back(word);
        } else if (option->get_items_expected_min() > 0 && equals == std::string::npos) {
            ++i;  // its value
        }
    }
    return words;
}

}  // namespace llmc
