#include "simt/site.h"

#include <cstring>

namespace simt {

namespace {

bool same_line(const std::source_location& a, const std::source_location& b) {
    return a.line() == b.line() && a.column() == b.column() &&
           (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

}  // namespace

std::string text(const Site& site) {
    const std::string last = std::string(site.line.file_name()) + ":" + std::to_string(site.line.line());
    return site.caller ? text(*site.caller) + " > " + last : last;
}

bool same_place(const Site& first, const Site& second) {
    const Site *a = &first, *b = &second;
    for (; a && b && a != b; a = a->caller, b = b->caller) {
        if (!same_line(a->line, b->line)) return false;
    }
    return a == b;
}

std::source_location line_of_kernel(const Site& site) {
    return site.caller ? line_of_kernel(*site.caller) : site.line;
}

}  // namespace simt
