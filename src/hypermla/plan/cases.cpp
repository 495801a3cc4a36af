#include "hypermla/plan/cases.h"

#include <algorithm>
#include <set>
#include <string>

namespace hypermla {
namespace {

// Keeps the values whose field the plan has.
Json known_fields(KernelPlan& plan, const Json& values) {
  Json known = Json::object();
  for (const FieldRef& field : plan.problem_fields())
    if (values.contains(std::string(field.name))) known[std::string(field.name)] = values[std::string(field.name)];
  return known;
}

void add_unique(std::vector<Json>& cases, Json one) {
  if (std::find(cases.begin(), cases.end(), one) == cases.end()) cases.push_back(std::move(one));
}

}  // namespace

std::vector<Json> correctness_cases(KernelPlan& plan) {
  struct Shape {
    int b, s, t, h;
  };
  constexpr Shape kShapes[] = {{1, 1, 1, 1},    {2, 1, 64, 3},   {1, 2, 63, 16},   {3, 3, 65, 1},   {1, 16, 1000, 3},
                               {2, 17, 257, 5}, {1, 32, 128, 16}, {1, 33, 300, 2},  {1, 64, 513, 1}, {1, 65, 129, 3},
                               {1, 128, 384, 2}, {1, 129, 1000, 3}, {1, 1, 777, 128}, {2, 4, 200, 128}, {1, 20, 7, 2}};
  std::vector<Json> cases;
  for (const char* dtype : {"bfloat16", "float16"})
    for (bool causal : {false, true})
      for (const Shape& shape : kShapes)
        add_unique(cases, known_fields(plan, {{"b", shape.b}, {"s", shape.s}, {"t", shape.t}, {"h", shape.h},
                                              {"dtype", dtype}, {"causal", causal}}));
  return cases;
}

std::vector<Json> representative_problems(KernelPlan& plan) {
  std::vector<Json> problems;
  for (int s : {1, 16, 32, 64, 128})
    add_unique(problems, known_fields(plan, {{"b", 32}, {"s", s}, {"t", 4096}, {"h", 128}}));
  return problems;
}

bool tries_all_tilings(const Json& correctness_case) {
  return correctness_case.value("s", 1) % 16 != 0 && correctness_case.value("dtype", "") == "bfloat16";
}

std::vector<KernelSource> kernel_sources(const KernelPlan& plan, bool candidates) {
  std::vector<KernelSource> sources;
  const std::unique_ptr<Executable> executable = plan_empty(plan);
  for (CtKernel* kernel : executable->kernels()) {
    sources.push_back(kernel->source(kernel->tiling()));
    if (!candidates) continue;
    for (const Json& tiling : kernel->candidates()) sources.push_back(kernel->source(tiling));
  }
  return sources;
}

std::vector<KernelSource> verification_sources(KernelPlan& plan) {
  std::vector<KernelSource> sources;
  std::set<std::string> seen;
  for (const Json& one : correctness_cases(plan)) {
    set_problem(plan, one);
    for (KernelSource& source : kernel_sources(plan, tries_all_tilings(one)))
      if (seen.insert(source.instance).second) sources.push_back(std::move(source));
  }
  return sources;
}

}  // namespace hypermla
