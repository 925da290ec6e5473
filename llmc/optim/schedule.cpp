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

double factor(ScheduleKind kind, double p, double f) {
    switch (kind) {
        case ScheduleKind::constant:
            return 1.0;
        case ScheduleKind::linear:
            return 1.0 - (1.0 - f) * p;
        case ScheduleKind::cosine:
            return f + (1.0 - f) * (1.0 + std::cos(std::numbers::pi * p)) / 2.0;
        case ScheduleKind::wsd:
            return p < wsd_stable ? 1.0 : 1.0 - (1.0 - f) * (p - wsd_stable) / (1.0 - wsd_stable);
    }
    programming_error("an unknown schedule");
}

}  // namespace

double learning_rate(const Schedule& schedule, std::int64_t step) {
    const auto warmup = static_cast<double>(schedule.warmup_steps);
    const auto total = static_cast<double>(std::max(schedule.total_steps, schedule.warmup_steps + 1));
    const auto now = static_cast<double>(step);
    if (now <= warmup) return schedule.peak * now / warmup;
    const double p = std::min((now - 1.0 - warmup) / (total - warmup), 1.0);
    return schedule.peak * factor(schedule.kind, p, schedule.min_fraction);
}

}  // namespace llmc
