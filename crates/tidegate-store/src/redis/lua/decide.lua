-- core/batch.rs, `settle`: first all limits are judged, then either all are charged or those that refuse take their
-- strikes. Everything is read before anything is written, so what can't be read changes nothing.
--
-- The answer: the moment of the decision, then of each operation what its state was when it was judged (`facts` and the
-- penalty's record), or for one that only tells something whether it did anything; of a step of a pace what the pace was.
-- Without a fitting period of a quota: the moment alone.

local ADMITTED, PAROLE, REFUSED, BLOCKED = 0, 1, 2, 3

-- Bits of what stands against the call in other parts of its batch.
local refused, blocked = other_parts % 2 > 0, other_parts % 4 > 1
local watched_refused, watched_blocked = other_parts % 8 > 3, other_parts > 7

local states, ops, answers = {}, {}, { pack('<d', now) }

-- Behind the head, each operation begins with its length, and ends with its penalty.
local next_position = 34

for index, key in ipairs(KEYS) do
  local op = { done = 1 }
  local length
  length, op.kind, op.verb, op.shadow, op.counts, op.waives, op.paroles, op.penalised, op.never, op.cost, op.place =
    unpack('<BBBBBBBBBd', bytes, next_position)
  next_position = next_position + 1 + length
  if op.penalised == 1 then
    op.penalty = next_position - 40
    op.base, op.factor, op.cap, op.forgive, op.last = unpack('<ddddd', bytes, op.penalty)
  end
  local state = states[key]
  if not state then
    state = { key = key, ends = 0, parole = 0, strikes = 0 }
    load[op.kind](state)
    states[key] = state
  end
  op.state, ops[index] = state, op
  if op.kind == QUOTA and op.verb ~= RESET and not select_period(op) then return answers[1] end
  if op.verb <= PEEK then
    local verdict = evaluate[op.kind](op, state) and ADMITTED or REFUSED
    local answer = encode_state[op.kind](state, op)
    if op.penalised == 1 then
      refresh_record(op, state)
      answer = answer .. pack('<ddB', state.ends, state.parole, state.strikes)
      if state.strikes > 0 and state.ends > now then
        verdict = BLOCKED
      elseif verdict == REFUSED and op.waives == 1 and op.cost <= state.parole then
        verdict = PAROLE
      end
    end
    op.verdict, answers[index + 1] = verdict, answer
    if op.verb == TAKE and verdict >= REFUSED then
      watched_refused, watched_blocked = true, watched_blocked or verdict == BLOCKED
      if op.shadow == 0 then
        refused, blocked = true, blocked or verdict == BLOCKED
      end
    end
  end
end

-- Charges, and forgets a parole whose call has room without it.
local function charge_and_end_parole(op, state, leaves)
  if state.parole > 0 and (op.verdict == PAROLE or leaves and has_room_for_parole[op.kind](op, state)) then state.parole = 0 end
  charge[op.kind](op, state)
  state.changed = true
end

-- Empties the state, also for an operation on the same key that is still to come, and tells all nodes.
local function reset(op, state)
  local key = state.key
  call('DEL', key)
  for field in pairs(state) do
    state[field] = nil
  end
  state.key, state.ends, state.parole, state.strikes = key, 0, 0, 0
  load[op.kind](state)
  -- Who may not publish may reset all the same.
  redis.pcall('PUBLISH', ARGV[2], string.sub(bytes, op.place, op.place + 23))
end

for index, op in ipairs(ops) do
  local state = op.state
  if op.verb == TAKE then
    local is_refused, is_blocked = refused, blocked
    if op.shadow == 1 then
      is_refused, is_blocked = watched_refused, watched_blocked
    end
    if op.verdict < REFUSED then
      if not is_refused or (op.counts == 1 and op.verdict == ADMITTED) then charge_and_end_parole(op, state, true) end
    elseif not is_blocked and op.penalised == 1 and (op.free_at or now) < NEVER then
      add_strike(op, state)
    end
    if state.changed then save[op.kind](op, state) end
  elseif op.verb == RESET then
    reset(op, state)
  elseif op.verb == DEBIT and op.kind <= QUOTA then
    evaluate[op.kind](op, state)
    charge_and_end_parole(op, state, not (state.strikes > 0 and state.ends > now))
    save[op.kind](op, state)
  elseif op.verb == RESTORE_PENALTY then
    if op.penalised == 1 then
      evaluate[op.kind](op, state)
      restore_penalty(op, state)
      save[op.kind](op, state)
    end
  elseif op.verb > PEEK and apply[op.kind](op, state) then
    save[op.kind](op, state)
  end
  if op.verb > PEEK then answers[index + 1] = op.answer or pack('B', op.done) end
end

return table.concat(answers)
