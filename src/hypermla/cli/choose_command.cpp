#include <cstdio>

#include "hypermla/base/error.h"
#include "hypermla/cli/commands.h"
#include "hypermla/cli/options.h"
#include "hypermla/cli/session.h"
#include "hypermla/device/measure.h"
#include "hypermla/plan/choice.h"
#include "hypermla/plan/inputs.h"

namespace hypermla {
namespace {

// Measured microseconds of one ranked kernel; `sustained` on a GPU only, where a power cap lowers the clocks.
struct Measured {
  std::optional<double> burst, sustained;
  std::string why;  // it was not measured
};

Measured measure(const RankedKernel& ranked, const ChoiceProblem& problem, Session& session, double seconds) {
  Measured measured;
  try {
    Device& device = *session.device;
    std::vector<std::unique_ptr<AllocatedTensors>> memory;
    std::vector<std::unique_ptr<Executable>> stages;
    std::string what = ranked.entry.full_name();
    for (const auto& plan : plans_of(Registry::instance(), ranked, problem, session.planned)) {
      const double bytes = tensor_bytes(*plan);
      if (!(bytes < 0.95 * double(device.info().memory_bytes))) fail("its tensors need {:.1f} GB", bytes * 1e-9);
      memory.push_back(std::make_unique<AllocatedTensors>(*plan, session.device, 1));
      Tensors tensors = memory.back()->tensors();
      if (memory.size() > 1) tensors["o_latent"] = memory.front()->tensors().at("o");
      stages.push_back(plan->plan(tensors));
      stages.back()->prepare(session.compiler, device);
      what += " " + run_text(*plan, *stages.back());
    }
    session.runs(what);
    const auto work = [&](StreamHandle stream) {
      for (const auto& stage : stages) stage->run(stream);
    };
    measured.burst = measure_burst(device, work, 5).median() * 1e6;
    if (device.is_gpu()) measured.sustained = measure_sustained(device, work, seconds).median() * 1e6;
  } catch (const Error& error) {
    measured.why = error.what();
  }
  return measured;
}

Json to_json(const RankedKernel& ranked, const Measured& measured) {
  Json row = {{"path", path_name(ranked.path)},
              {"kernel", ranked.entry.full_name()},
              {"n", ranked.n},
              {"draft", ranked.entry.draft},
              {"burst_us", ranked.burst.seconds * 1e6},
              {"sustained_us", ranked.sustained.seconds * 1e6},
              {"limit", limit_name(ranked.sustained.limit)}};
  if (measured.burst) row["measured_burst_us"] = *measured.burst;
  if (measured.sustained) row["measured_sustained_us"] = *measured.sustained;
  if (!measured.why.empty()) row["not_measured"] = measured.why;
  return row;
}

std::string measured_text(const std::optional<double>& measured, const TimeEstimate& predicted) {
  if (!measured) return fmt::format("{:>10} {:>8}", "-", "");
  return fmt::format("{:>10.1f} {:>+7.1f}%", *measured, 100 * (predicted.seconds * 1e6 / *measured - 1));
}

}  // namespace

int choose_command(const Words& words) {
  ChoiceProblem problem;
  std::string device = "auto", device_name, language;
  bool measuring = false, json = false;
  double seconds = 1;
  CLI::App app(
      "Which kernel, and how many decompressed tokens, for a problem: all that take it, ranked by the time that the\n"
      "model predicts (docs/choice.md), the output decompression included.\n",
      "hypermla choose");
  Json said = Json::object();
  add_fields(app, fields_of(problem), "Problem", said);
  app.add_option("--device", device, "auto (the first GPU, else the CPU), cpu, cuda or cuda:N")->group("Run");
  app.add_option("--device_name", device_name, "predict for this entry of devices.json, without having the device")
      ->group("Run");
  app.add_option("--language", language, "rank only the kernels in cute or in cutile")->group("Run");
  app.add_flag("--measure", measuring, "measure each of them here, too, and say by how much the prediction is off")
      ->group("Run");
  app.add_option("--seconds", seconds, "how long a GPU is kept busy before a sustained figure (default 1)")
      ->check(within(0, 60))
      ->group("Run");
  app.add_flag("--json", json, "print one JSON object instead of a table")->group("Run");
  if (!parse(app, words)) return 0;
  if (!device_name.empty() && app.count("--device"))
    fail("--device_name={} is predicted for, and --device names a present device: leave one of them out", device_name);
  if (!measuring && app.count("--seconds")) fail("--seconds says how long to measure; add --measure, or leave it out");
  if (measuring && !device_name.empty())
    fail("--device_name={} is predicted for, and --measure runs on the present device: choose one of them",
         device_name);

  set_fields("the choice", fields_of(problem), said);
  if (said.contains("t") && problem.own > 0 && problem.t != problem.prefix + problem.own)
    fail("--t={} is not what --prefix={} and --private={} add up to; leave one of them out", problem.t, problem.prefix,
         problem.own);
  if (problem.prefixes > 1 && problem.prefix == 0)
    fail("--prefixes={} says how many prefixes there are; add --prefix, their tokens, or leave it out",
         problem.prefixes);
  problem.settle();
  Session session(device_name.empty() ? device : "cpu");
  const PlannedDevice on = device_name.empty() ? session.planned : planned_device(session.devices, device_name);
  const std::vector<RankedKernel> ranking = rank_kernels(Registry::instance(), problem, on, language);
  const RankedKernel& best = choice(ranking);

  Json problem_json = fields_json(problem);
  problem_json.erase("private");
  Json rows = Json::array();
  if (!json) {
    std::string text;
    for (const FieldRef& field : fields_of(problem))
      if (field.name != "private") text += fmt::format(" {}={}", field.name, field.text());
    fmt::print("{} ({}):{}\n{:<13} {:<34} {:>7} {:>10} {:>10}  {:<8}", on.spec.name, on.target.arch, text, "path",
               "kernel", "n", "burst us", "sustained", "bound");
    fmt::print("{}\n",
               measuring ? fmt::format(" {:>10} {:>8} {:>10} {:>8}", "measured", "error", "sustained", "error") : "");
  }
  for (const RankedKernel& one : ranking) {
    const Measured measured = measuring ? measure(one, problem, session, seconds) : Measured{};
    rows.push_back(to_json(one, measured));
    if (json) continue;
    fmt::print("{:<13} {:<34} {:>7} {:>10.1f} {:>10.1f}  {:<8}", path_name(one.path),
               one.entry.full_name() + (one.entry.draft ? " (draft)" : ""), one.n, one.burst.seconds * 1e6,
               one.sustained.seconds * 1e6, limit_name(one.sustained.limit));
    if (measuring)
      fmt::print(" {}", measured.why.empty() ? measured_text(measured.burst, one.burst) + " " +
                                                   measured_text(measured.sustained, one.sustained)
                                             : "not measured: " + measured.why);
    fmt::print("\n");
    std::fflush(stdout);
  }
  if (json)
    fmt::print("{}\n", Json{{"device", on.spec.name},
                            {"problem", problem_json},
                            {"choice", {{"kernel", best.entry.full_name()}, {"n", best.n}}},
                            {"ranking", rows}}
                           .dump(2));
  else
    fmt::print("choice        {}, {} path{}\n", best.entry.full_name(), path_name(best.path),
               best.n > 0 && best.n < problem.t ? fmt::format(", n={}", best.n) : "");
  return 0;
}

}  // namespace hypermla
