// cases            lists the names
// cases NAME       runs one: exit status 0 right, 1 a fault was reported (its text is printed), 2 a wrong result, 3 no such case
#include <cstring>

#include "harness.h"
#include "simt/schedule.h"

namespace sparselift::cuda {

static const std::vector<Case>* const kCases[] = {&collective_cases, &memory_cases, &fault_cases,  &planted_cases,
                                                  &dense_cases,      &interaction_cases, &maxima_cases, &sort_cases};

static const Case* find(const char* name) {
    for (const auto* cases : kCases)
        for (const Case& entry : *cases)
            if (std::strcmp(entry.name, name) == 0) return &entry;
    return nullptr;
}

static int run(const char* name) {
    const Case* entry = find(name);
    if (!entry) return 3;
    const Outcome outcome = entry->run();
    if (outcome.status == SL_OK) return outcome.right ? 0 : 2;
    std::printf("%s\n", sl_error_text());
    return 1;
}

static void list() {
    for (const auto* cases : kCases)
        for (const Case& entry : *cases) std::printf("%s\n", entry.name);
}

}  // namespace sparselift::cuda

int main(int count, char** arguments) {
    if (count == 2) return sparselift::cuda::run(arguments[1]);
    sparselift::cuda::list();
    return 0;
}
