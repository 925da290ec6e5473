#include "llmc/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "llmc/core/error.h"
#include "llmc/core/text.h"

namespace llmc {

std::string_view name_of(ScheduleKind kind) {
    return name_among(kind, "cosine", "linear", "constant", "wsd");
}

namespace {

constexpr double wsd_stable = 0.8;  // share of the steps after warmup

// p is the share of the steps after warmup that is done before this one, and q the share after it.
double factor(ScheduleKind kind, double p, double q, double f) {
    switch (kind) {
        case ScheduleKind::constant:
            return 1.0;
        case ScheduleKind::linear:
            return 1.0 - (1.0 - f) * p;
        case ScheduleKind::cosine:
            return f + (1.0 - f) * (1.0 + std::cos(std::numbers::pi * p)) / 2.0;
        case ScheduleKind::wsd:
            return q <= wsd_stable ? 1.0 : 1.0 - (1.0 - f) * (q - wsd_stable) / (1.0 - wsd_stable);
    }
    programming_error("an unknown schedule");
}

}  // namespace

double learning_rate(const Schedule& schedule, std::int64_t step) {
    const auto warmup = static_cast<double>(schedule.warmup_steps);
    const auto total = static_cast<double>(std::max(schedule.total_steps, schedule.warmup_steps + 1));
    const auto now = static_cast<double>(step);
    if (now <= warmup) return schedule.peak * now / warmup;
    const auto share = [&](double steps) { return std::min((steps - warmup) / (total - warmup), 1.0); };
    return schedule.peak * factor(schedule.kind, share(now - 1.0), share(now), schedule.min_fraction);
}

}  // namespace llmc
