#include "wire.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cmath>
#include <limits>
#include <linux/futex.h>
#include <new>
#include <stdexcept>
#include <sys/syscall.h>
#include <unistd.h>

#include "signal.h"

namespace weft {

namespace {

constexpr uint64_t kMagic = 0x77656674'77697265;  // "weftwire"
constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kSoon = 20'000;  // a card that would look so many nanoseconds too late is not woken for that
constexpr int64_t kHeldTooLongNs = 10'000'000'000;  // by a process that was stopped while it held the wire

bool is_on_its_way(uint32_t state) { return state == kPosted || state == kQueued || state == kFlowing || state == kWired; }

}  // namespace

void futex_wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

bool futex_sleep(std::atomic<uint32_t>& word, uint32_t seen, int64_t deadline_ns) {
  const timespec until{deadline_ns / 1'000'000'000, deadline_ns % 1'000'000'000};
  const timespec* limit = deadline_ns == INT64_MAX ? nullptr : &until;
  const long result = syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, seen, limit, nullptr, FUTEX_BITSET_MATCH_ANY);
  return !(result < 0 && errno == EINTR);
}

size_t Wire::bytes(uint64_t staging, uint32_t processes) { return (sizeof(Wire) + 4095) / 4096 * 4096 + staging * processes; }

void Wire::start(uint32_t hosts_, double rate_, double latency_ns, uint64_t chunk_, uint64_t staging_) {
  pthread_mutexattr_t shared;
  pthread_mutexattr_init(&shared);
  pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
  pthread_mutex_init(&mutex, &shared);
  pthread_mutexattr_destroy(&shared);
  hosts = hosts_, rate = rate_, latency = latency_ns, chunk = chunk_, staging = staging_;
  epoch_ns = steady_now_ns();
  magic = kMagic;
}

double Wire::clock() const { return double(steady_now_ns() - epoch_ns); }

HeldWire::HeldWire(Wire& wire) : wire_(wire) {
  if (wire.magic != kMagic) throw std::runtime_error("this memory holds no wire of a lab");
  take();
}

void HeldWire::take() {
  const int64_t until = steady_now_ns() + kHeldTooLongNs;
  const timespec limit{until / 1'000'000'000, until % 1'000'000'000};
  const int error = pthread_mutex_clocklock(&wire_.mutex, CLOCK_MONOTONIC, &limit);
  if (error == EOWNERDEAD) {
    pthread_mutex_consistent(&wire_.mutex);
    is_held_ = true;
    repair();
  } else if (error != 0) {
    throw std::runtime_error("the lab's wire is held by a rank that does not go on: it was stopped");
  }
  is_held_ = true;
}

void HeldWire::let_go() {
  if (!is_held_) return;
  is_held_ = false;
  pthread_mutex_unlock(&wire_.mutex);
  for (uint32_t process : rings_) futex_wake(wire_.process[process].bell);
  rings_.clear();
}

uint32_t HeldWire::place(PostKind kind, uint32_t process) {
  Inbox& inbox = wire_.inbox[process];
  for (uint32_t word = 0; word < kMaxPosts / 64; ++word) {
    if (~inbox.used[kind][word] == 0) continue;
    const uint32_t bit = uint32_t(__builtin_ctzll(~inbox.used[kind][word]));
    inbox.used[kind][word] |= uint64_t(1) << bit;
    return 64 * word + bit;
  }
  return kNobody;
}

void HeldWire::release(PostKind kind, uint32_t process, uint32_t place) {
  Post& post = wire_.post(kind, process, place);
  post.generation++;
  post.state.store(kFree);
  wire_.inbox[process].used[kind][place / 64] &= ~(uint64_t(1) << place % 64);
}

void HeldWire::settle(Post& post, PostState state, Fault fault) {
  post.fault = fault;
  post.state.store(state, std::memory_order_release);
  futex_wake(post.state);
}

void HeldWire::meet(PostKind kind, uint32_t process, uint32_t place) {
  const PostKind others = kind == kSend ? kReceive : kSend;
  Post& mine = wire_.post(kind, process, place);
  uint32_t found = kNobody;
  each_used(wire_.inbox[process], others, [&](uint32_t at) {
    const Post& it = wire_.post(others, process, at);
    const uint32_t source = kind == kSend ? it.source : mine.source, from = kind == kSend ? mine.source : it.source;
    const bool fits = it.state == kPosted && it.target == mine.target && it.tag == mine.tag;
    if (!fits || (source != kNobody && source != from)) return;
    if (found == kNobody || it.number < wire_.post(others, process, found).number) found = at;
  });
  if (found == kNobody) return;
  Post& other = wire_.post(others, process, found);
  mine.other = found, other.other = place;
  Post &receive = kind == kSend ? other : mine, &send = kind == kSend ? mine : other;
  const uint32_t at = kind == kSend ? found : place;
  receive.source = send.source;
  if (receive.bytes < send.bytes) {
    settle(send, kFailed, Fault::kSizes);
    settle(receive, kFailed, Fault::kSizes);
    send.copied = receive.bytes, receive.copied = send.bytes;  // for the message
    return;
  }
  receive.bytes = send.bytes;  // which may be fewer than there is room for, as on gloo
  receive.moved = receive.rate = 0, receive.copied = 0;
  send.state.store(kQueued), receive.state.store(kQueued);
  advance();
  bool is_first = true;
  each_used(wire_.inbox[process], kReceive, [&](uint32_t i) {
    const Post& it = wire_.post(kReceive, process, i);
    is_first = is_first && !(it.state == kFlowing && it.source == send.source && it.target == send.target);
  });
  if (is_first) {
    flow_on(process, at);
    share_rates();
    ring_whom_it_concerns();
  }
}

// The message is next between its endpoints. Inside a host it is across at once.
void HeldWire::flow_on(uint32_t process, uint32_t place) {
  Post& receive = wire_.post(kReceive, process, place);
  const bool is_inside = wire_.host_of(receive.source) == wire_.host_of(receive.target);
  if (is_inside || receive.bytes == 0 || wire_.flows == kMaxFlows) {
    receive.moved = double(receive.bytes);
    receive.due = wire_.now + (is_inside ? 0 : wire_.latency);
    receive.state.store(kWired);
    if (receive.due < wire_.process[process].wakes) rings_.push_back(process), wire_.process[process].bell++;
    return;
  }
  receive.state.store(kFlowing);
  wire_.flow[wire_.flows++] = {process, place};
}

void HeldWire::next_of_pair(uint32_t process, uint32_t source, uint32_t target) {
  for (;;) {  // several, where they are across at once
    uint32_t first = kNobody;
    each_used(wire_.inbox[process], kReceive, [&](uint32_t i) {
      const Post& it = wire_.post(kReceive, process, i);
      if (it.state != kQueued || it.source != source || it.target != target) return;
      const uint64_t number = wire_.send_of(process, it).number;
      if (first == kNobody || number < wire_.send_of(process, wire_.post(kReceive, process, first)).number) first = i;
    });
    if (first == kNobody) return;
    flow_on(process, first);
    if (wire_.post(kReceive, process, first).state == kFlowing) return;
  }
}

void HeldWire::wired(uint32_t flow) {
  const Flow ended = wire_.flow[flow];
  Post& receive = wire_.receive(ended);
  receive.moved = double(receive.bytes);
  receive.due = wire_.now + wire_.latency;
  receive.state.store(kWired);
  wire_.carried[2 * wire_.host_of(receive.source)] += receive.bytes;
  wire_.carried[2 * wire_.host_of(receive.target) + 1] += receive.bytes;
  wire_.flow[flow] = wire_.flow[--wire_.flows];
  next_of_pair(ended.process, receive.source, receive.target);
}

void HeldWire::advance() {
  const double now = wire_.clock();
  bool has_changed = false;
  for (;;) {
    double until = now;
    uint32_t ends = kNobody;
    for (uint32_t f = 0; f < wire_.flows; ++f) {
      const Post& receive = wire_.receive(wire_.flow[f]);
      const double end = wire_.now + (double(receive.bytes) - receive.moved) / receive.rate;
      if (end <= until) until = end, ends = f;
    }
    for (uint32_t f = 0; f < wire_.flows; ++f) {
      Post& receive = wire_.receive(wire_.flow[f]);
      receive.moved = std::min(double(receive.bytes), receive.moved + receive.rate * (until - wire_.now));
    }
    wire_.now = std::max(wire_.now, until);
    if (ends == kNobody) break;
    wired(ends);
    share_rates();
    has_changed = true;
  }
  if (has_changed) ring_whom_it_concerns();
}

// Max-min: the card with the least for each of its flows decides these, and so on with what is left.
void HeldWire::share_rates() {
  const uint32_t links = 2 * wire_.hosts;
  double room[2 * kMaxHosts];
  uint32_t count[2 * kMaxHosts];
  std::fill(room, room + links, wire_.rate);
  std::fill(count, count + links, 0);
  auto out = [&](const Post& p) { return 2 * wire_.host_of(p.source); };
  auto in = [&](const Post& p) { return 2 * wire_.host_of(p.target) + 1; };
  for (uint32_t f = 0; f < wire_.flows; ++f) {
    Post& p = wire_.receive(wire_.flow[f]);
    p.rate = -1, count[out(p)]++, count[in(p)]++;
  }
  for (;;) {
    uint32_t least = kNobody;
    for (uint32_t link = 0; link < links; ++link)
      if (count[link] && (least == kNobody || room[link] * count[least] < room[least] * count[link])) least = link;
    if (least == kNobody) return;
    const double share = std::max(room[least] / count[least], wire_.rate * 1e-6);
    for (uint32_t f = 0; f < wire_.flows; ++f) {
      Post& p = wire_.receive(wire_.flow[f]);
      if (p.rate >= 0 || (out(p) != least && in(p) != least)) continue;
      p.rate = share;
      for (uint32_t link : {out(p), in(p)}) room[link] -= share, count[link]--;
    }
  }
}

double HeldWire::due(const Post& receive) const {
  if (receive.state == kWired) return receive.due;
  const double next = std::min(double(receive.bytes), double(receive.copied + wire_.chunk));
  const double across = wire_.now + std::max(0.0, next - receive.moved) / receive.rate;
  return next == double(receive.bytes) ? across + wire_.latency : across;
}

void HeldWire::ring_whom_it_concerns() {
  for (uint32_t f = 0; f < wire_.flows; ++f) {
    Process& process = wire_.process[wire_.flow[f].process];
    const double when = due(wire_.receive(wire_.flow[f]));
    if (when + kSoon >= process.wakes) continue;
    process.wakes = when;
    process.bell++;
    rings_.push_back(wire_.flow[f].process);
  }
}

void HeldWire::finish(uint32_t process, uint32_t place) {
  Post& receive = wire_.post(kReceive, process, place);
  Post& send = wire_.send_of(process, receive);
  settle(receive, kDone, Fault::kNone);
  settle(send, kDone, Fault::kNone);
}

void HeldWire::drop_flow(uint32_t process, uint32_t place) {
  for (uint32_t f = 0; f < wire_.flows; ++f)
    if (wire_.flow[f].process == process && wire_.flow[f].place == place) {
      wire_.flow[f] = wire_.flow[--wire_.flows];
      return;
    }
}

void HeldWire::fail(PostKind kind, uint32_t process, uint32_t place, Fault fault, Fault counterpart) {
  Post& mine = wire_.post(kind, process, place);
  const uint32_t state = mine.state;
  if (!is_on_its_way(state)) return;
  if (state == kPosted) return settle(mine, kFailed, fault);
  const uint32_t at = kind == kReceive ? place : mine.other;
  Post &receive = wire_.post(kReceive, process, at), &send = wire_.send_of(process, receive);
  const bool flowed = receive.state == kFlowing;
  if (flowed) advance();
  if (!is_on_its_way(receive.state)) return;
  drop_flow(process, at);
  settle(receive, kFailed, kind == kReceive ? fault : counterpart);
  settle(send, kFailed, kind == kSend ? fault : counterpart);
  if (flowed) {
    next_of_pair(process, receive.source, receive.target);
    share_rates();
    ring_whom_it_concerns();
  }
}

void HeldWire::end(uint32_t endpoint, EndpointState state, Fault own, Fault peers) {
  if (wire_.endpoint[endpoint].state != kOpen) return;
  wire_.endpoint[endpoint].state = state;
  for (uint32_t process = 0; process < wire_.processes; ++process)
    for (PostKind kind : {kSend, kReceive})
      each_used(wire_.inbox[process], kind, [&](uint32_t place) {
        const Post& post = wire_.post(kind, process, place);
        const bool is_source = post.source == endpoint, is_target = post.target == endpoint;
        if (!is_source && !is_target) return;
        const bool is_own = kind == kSend ? is_source : is_target;
        fail(kind, process, place, is_own ? own : peers, is_own ? peers : own);
      });
}

void HeldWire::bury(uint32_t process) {
  if (wire_.process[process].is_dead) return;
  wire_.process[process].is_dead = 1;
  for (uint32_t e = 0; e < wire_.endpoints; ++e)
    if (wire_.endpoint[e].process == process) end(e, kDead, Fault::kDied, Fault::kDied);
}

// A process died while it held the wire: what its posts and lists say may be half written.
void HeldWire::repair() {
  wire_.flows = 0;
  for (uint32_t process = 0; process < wire_.processes; ++process) {
    Inbox& inbox = wire_.inbox[process];
    for (PostKind kind : {kSend, kReceive})
      for (uint32_t place = 0; place < kMaxPosts; ++place) {
        const uint64_t bit = uint64_t(1) << place % 64;
        if (inbox.posts[kind][place].state == kFree) inbox.used[kind][place / 64] &= ~bit;
        else inbox.used[kind][place / 64] |= bit;
      }
    each_used(inbox, kReceive, [&](uint32_t place) {
      Post& receive = inbox.posts[kReceive][place];
      if (receive.state == kFlowing && wire_.flows < kMaxFlows) wire_.flow[wire_.flows++] = {process, place};
    });
  }
  share_rates();
  ring_whom_it_concerns();
}

}  // namespace weft
