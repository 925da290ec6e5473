// Implements session.h.
#include "dev/lab/session.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>

#include "dev/lab/gpu.h"
#include "dev/lab/rivals.h"
#include "dev/lab/table.h"

namespace lab {
namespace {

using llmc::DType;

bool chosen(const SessionOptions& options, const Variant& variant) {
    const auto& numbers = options.variants;
    return numbers.empty() || std::find(numbers.begin(), numbers.end(), variant.number) != numbers.end();
}

// The rates that the GPU and its libraries reach in this run.
struct Ceilings {
    double bytes_a_second, flops_a_second;
};

// The launches of one run of a variant.
class Launches : public llmc::cuda::LaunchObserver {
  public:
    void launched(const llmc::cuda::LaunchRecord& record) override { records.push_back(record); }
    std::vector<llmc::cuda::LaunchRecord> records;
};

// The resources of a variant's kernels, in the order of their first launches. For each kernel they are those
// of its largest shape, since shared memory may grow with it, at the best block size. Empty if the figures of
// a kernel are unknown.
std::vector<Resources> resources_of(const Launches& launches, const llmc::cuda::Chip& chip) {
    std::vector<Resources> kernels;
    for (const auto& record : launches.records) {
        const auto figures = kernel_figures(chip, record.kernel);
        if (!figures) return {};
        const int threads = static_cast<int>(record.block.x * record.block.y * record.block.z);
        const auto shared = static_cast<int>(record.dynamic_shared_bytes) + figures->static_shared_bytes;
        const int blocks =
            blocks_at_a_time(chip, threads, figures->registers, static_cast<std::size_t>(shared));
        const double occupancy = static_cast<double>(blocks) * threads / chip.threads_per_multiprocessor;
        const Resources own{figures->name, figures->registers, shared, occupancy, figures->local_bytes};
        const auto known = std::ranges::find(kernels, figures->name, &Resources::kernel);
        if (known == kernels.end()) {
            kernels.push_back(own);
        } else if (shared > known->shared_bytes || occupancy > known->occupancy) {
            *known = own;
        }
    }
    return kernels;
}

// The names of all chips' kernels, each once.
std::vector<std::string> kernels_of(const std::vector<std::vector<Resources>>& of_chips) {
    std::vector<std::string> names;
    for (const auto& of_chip : of_chips) {
        for (const Resources& own : of_chip) {
            if (std::ranges::find(names, own.kernel) == names.end()) names.push_back(own.kernel);
        }
    }
    return names;
}

// "38 / 40": a kernel's figure on each chip; "-" if the chip uses another kernel instead.
std::string on_each_chip(const std::vector<std::vector<Resources>>& of_chips, const std::string& kernel,
                         const std::function<std::string(const Resources&)>& figure) {
    std::vector<std::string> figures;
    for (const auto& of_chip : of_chips) {
        const auto own = std::ranges::find(of_chip, kernel, &Resources::kernel);
        figures.push_back(own == of_chip.end() ? "-" : figure(*own));
    }
    return fmt::format("{}", fmt::join(figures, " / "));
}

// "32 128 512"
std::string text(const std::vector<int>& block_sizes) {
    return fmt::format("{}", fmt::join(block_sizes, " "));
}

std::string text(const Shape& shape) {
    std::string all;
    for (const std::int64_t size : shape) all += (all.empty() ? "" : " x ") + std::to_string(size);
    return all;
}

class Session {
  public:
    Session(const Operation& operation, const SessionOptions& options)
        : operation_(operation),
          options_(options),
          dtype_(llmc::dtype_named(options.dtype)),
          on_(gpu_context()),
          timed_(!gpu_name().empty() && options.time) {}

    bool run() {
        const bool known =
            std::find(operation_.dtypes.begin(), operation_.dtypes.end(), dtype_) != operation_.dtypes.end();
        if (!known) llmc::user_error("{} has no variants in {}", operation_.name, options_.dtype);
        for (const int number : options_.variants) {
            const auto has = [&](const Variant& variant) { return variant.number == number; };
            if (std::none_of(operation_.variants.begin(), operation_.variants.end(), has)) {
                llmc::user_error("{} has no variant {}; it has 1 to {}", operation_.name, number,
                                 operation_.variants.back().number);
            }
        }
        fmt::print("{} in {}, seed {}\n", operation_.name, options_.dtype, options_.seed);
        const bool good = !options_.check || check();
        if (timed_) time();
        if (!timed_ && !options_.json.empty())
            fmt::print("{} gets nothing: there are no timings {}\n", options_.json,
                       options_.time ? "without a GPU" : "with --check");
        return good;
    }

  private:
    bool check() {
        const std::string where = gpu_name();
        fmt::print(
            "Checked on {}, {} shapes, with blocks of these sizes; error: the largest, as a share of its "
            "bound\n",
            where.empty() ? "the CPU (test/simt)" : where, operation_.checked.size());
        Table table(
            {"variant", "", "block", "error", "registers", "stack, spills", "shared bytes", "occupancy"});
        const auto known = known_chips();
        const auto chips = known.empty() ? std::vector{on_.chip} : known;
        bool fixed = false;  // whether a variant has only one block size
        bool any = false, all_good = true;
        for (const Variant& variant : operation_.variants) {
            if (!chosen(options_, variant)) continue;
            if (!has_variant(operation_, variant, dtype_)) {
                table.row({std::to_string(variant.number), variant.story, "", "not in " + options_.dtype, "",
                           "", "", ""});
                continue;
            }
            any = true;
            Comparison result;  // the worst of all chips
            std::vector<std::vector<Resources>> resources;
            for (const auto& chip : chips) {
                Launches launches;
                auto on = on_;
                on.chip = chip;
                on.observer = &launches;
                const auto on_chip = check_variant(operation_, variant, dtype_, on, options_.seed);
                if (on_chip.worst() > result.worst()) result = on_chip;
                resources.push_back(resources_of(launches, chip));
            }
            fixed = fixed || variant.block_sizes.size() == 1;
            table.row({std::to_string(variant.number), variant.story, text(variant.block_sizes),
                       result.good() ? fmt::format("{:.2f}", result.worst()) : "WRONG", "", "", "", ""});
            for (const std::string& kernel : kernels_of(resources)) {
                const auto figures = [&](auto text) { return on_each_chip(resources, kernel, text); };
                table.row({"", "  " + kernel, "", "",
                           figures([](const Resources& own) { return std::to_string(own.registers); }),
                           figures([](const Resources& own) { return std::to_string(own.local_bytes); }),
                           figures([](const Resources& own) { return std::to_string(own.shared_bytes); }),
                           figures([](const Resources& own) {
                               return fmt::format("{:.0f}%", own.occupancy * 100);
                           })});
            }
            if (!result.good())
                fmt::print(stderr, "wrong: variant {}: {}\n", variant.number, result.first_failure());
            all_good = all_good && result.good();
        }
        table.print();
        if (!any)
            llmc::user_error("nothing was checked: {} has none of these in {}", operation_.name,
                             options_.dtype);
        if (fixed) fmt::print("The variant's tiling fixes the only block size.\n");
        if (where.empty()) {
            std::string names;
            for (const auto& chip : known)
                names += fmt::format("{}sm_{}", names.empty() ? "" : " / ", chip.architecture);
            if (known.empty()) {
                fmt::print(
                    "Registers, shared memory and occupancy are unknown: nvcc made no report here on sm_80, "
                    "sm_86 or sm_90 (GPU_ARCH chooses). Times need a GPU.\n");
            } else {
                fmt::print(
                    "Registers are the compiler's for {}; shared memory and occupancy are of these small "
                    "shapes. Times need a GPU.\n",
                    names);
            }
        }
        return all_good;
    }

    void time() {
        const Ceilings ceilings{copy_bandwidth(), product_rate()};
        fmt::print("\nTimed on {}: a copy reaches {:.0f} GB/s, a large bf16 product {:.0f} TFLOP/s\n",
                   gpu_name(), ceilings.bytes_a_second / 1e9, ceilings.flops_a_second / 1e12);
        for (const Shape& shape : operation_.timed) {
            fmt::print("\n{}\n", text(shape));
            Table table({"variant", "", "block", "us", "GB/s", "TFLOP/s", "of the ceiling"});
            Draw draw(options_.seed);
            const auto problem = operation_.make(dtype_, shape, draw);
            for (const Variant& variant : operation_.variants) {
                if (!chosen(options_, variant)) continue;
                if (operation_.takes && !operation_.takes(variant.number, dtype_, shape)) continue;
                time_variant(variant, shape, *problem, ceilings, table);
            }
            const auto rivals = rivals_of(operation_.name, dtype_, shape);
            for (const auto& rival : rivals) {
                if (!rival.run) continue;
                add(table, rival.name, "", 0, shape, milliseconds(rival.run, rival.stream), *problem,
                    ceilings, {});
            }
            table.print();
            for (const auto& rival : rivals) {
                if (!rival.run) tell_missing(rival, shape);
            }
        }
    }

    void time_variant(const Variant& variant, const Shape& shape, Problem& problem, const Ceilings& ceilings,
                      Table& table) {
        int best_block = 0;
        double best = 0;
        for (const int block : variant.block_sizes) {
            problem.reset();
            const double ms = milliseconds([&] { problem.run(variant.number, block, on_); });
            if (best_block == 0 || ms < best) {
                best_block = block;
                best = ms;
            }
        }
        Launches launches;
        auto on = on_;
        on.observer = &launches;
        problem.run(variant.number, best_block, on);
        add(table, std::to_string(variant.number), variant.story, best_block, shape, best, problem, ceilings,
            resources_of(launches, on_.chip));
    }

    void add(Table& table, const std::string& name, const std::string& story, int block, const Shape& shape,
             double ms, const Problem& problem, const Ceilings& ceilings,
             const std::vector<Resources>& kernels) {
        const double bytes_a_second = problem.bytes() / (ms * 1e-3),
                     flops_a_second = problem.flops() / (ms * 1e-3);
        // The roofline: the larger of the two minimum times.
        const double least = std::max(problem.bytes() / ceilings.bytes_a_second,
                                      problem.flops() / std::max(ceilings.flops_a_second, 1.0));
        const double share = least / (ms * 1e-3);
        table.row({name, story, block == 0 ? "" : std::to_string(block), fmt::format("{:.1f}", ms * 1e3),
                   fmt::format("{:.0f}", bytes_a_second / 1e9),
                   problem.flops() == 0 ? "" : fmt::format("{:.1f}", flops_a_second / 1e12),
                   fmt::format("{:.0f}%", share * 100)});
        nlohmann::json of_kernels = nlohmann::json::array();
        for (const Resources& kernel : kernels) {
            of_kernels.push_back({{"name", kernel.kernel},
                                  {"registers", kernel.registers},
                                  {"local_bytes", kernel.local_bytes},
                                  {"shared_bytes", kernel.shared_bytes},
                                  {"occupancy", kernel.occupancy}});
        }
        write({{"operation", operation_.name},
               {"dtype", options_.dtype},
               {"shape", shape},
               {"sizes", operation_.sizes},
               {"variant", name},
               {"story", story},
               {"block", block},
               {"microseconds", ms * 1e3},
               {"bytes", problem.bytes()},
               {"flops", problem.flops()},
               {"share", share},
               {"kernels", of_kernels},
               {"gpu", gpu_name()},
               {"copy_bytes_a_second", ceilings.bytes_a_second},
               {"product_flops_a_second", ceilings.flops_a_second}});
    }

    void tell_missing(const Rival& rival, const Shape& shape) {
        fmt::print("{} was not timed: {}\n", rival.name, rival.missing);
        write({{"operation", operation_.name},
               {"dtype", options_.dtype},
               {"shape", shape},
               {"variant", rival.name},
               {"missing", rival.missing}});
    }

    void write(const nlohmann::json& line) {
        if (options_.json.empty()) return;
        std::FILE* file = std::fopen(options_.json.c_str(), "a");
        if (!file) llmc::user_error("{} cannot be written", options_.json);
        fmt::print(file, "{}\n", line.dump());
        std::fclose(file);
    }

    const Operation& operation_;
    const SessionOptions& options_;
    DType dtype_;
    llmc::cuda::LaunchContext on_;
    bool timed_;
};

}  // namespace

bool run_session(const Operation& operation, const SessionOptions& options) {
    return Session(operation, options).run();
}

}  // namespace lab
