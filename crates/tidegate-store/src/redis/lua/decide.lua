-- core/batch/execute.rs: first all limits are evaluated. Then either all are charged, or those that refuse add their
-- strikes. Everything is read before anything is written, so an unreadable state changes nothing.
--
-- The response is the time of the decision, then for each operation: the evaluated state (`encode_state`) and its
-- penalty record; for a verb that updates, whether it did anything, or, for PACE_STEP and TAKE_BY_TERMS, the state before. If the
-- time is in no period that was sent for a quota, the response is the time alone.

local ADMITTED, PAROLE, REFUSED, BLOCKED = 0, 1, 2, 3

-- The refusals by other parts of the batch.
local enforced_refused, enforced_blocked = other_parts % 2 > 0, other_parts % 4 > 1
local several_refused = false
local any_refused, any_blocked = other_parts % 8 > 3, other_parts > 7

local states, ops, responses = {}, {}, { pack('<d', now) }

-- After the header, each operation begins with its length, and ends with its penalty.
local next_position = 34

-- The key of a limit's reservations follows the key of its state.
local index, key_index = 0, 0

while next_position <= #bytes do
  index, key_index = index + 1, key_index + 1
  local key = KEYS[key_index]
  local op = { is_applied = 1 }
  local length
  length, op.kind, op.verb, op.is_shadow, op.counts_refused, op.allows_parole, op.grants_parole, op.has_penalty,
    op.exceeds_capacity, op.cost, op.position =
    unpack('<BBBBBBBBBd', bytes, next_position)
  next_position = next_position + 1 + length
  if op.has_penalty == 1 then
    op.penalty_position = next_position - 40
    op.base, op.factor, op.cap, op.forgive_after, op.max_strikes = unpack('<ddddd', bytes, op.penalty_position)
  elseif op.has_penalty == RESERVES then
    op.rules_position, key_index = next_position - RESERVATION_RULE_BYTES, key_index + 1
    op.queue_key = KEYS[key_index]
  end
  local state = states[key]
  if not state then
    state = { key = key, blocked_until = 0, parole = 0, strikes = 0 }
    load[op.kind](state)
    states[key] = state
  end
  op.state, ops[index] = state, op
  if op.kind == QUOTA and op.verb ~= RESET and not select_period(op) then return responses[1] end
  if op.verb <= PEEK then
    local admission, response
    if op.has_penalty == RESERVES then
      load_queue(op)
      admission = evaluate_reserved(op, state) and ADMITTED or REFUSED
      response = encode_state[op.kind](state, op) .. op.found
    else
      admission = evaluate[op.kind](op, state) and ADMITTED or REFUSED
      response = encode_state[op.kind](state, op)
    end
    if op.has_penalty == 1 then
      refresh_record(op, state)
      response = response .. pack('<ddB', state.blocked_until, state.parole, state.strikes)
      if state.strikes > 0 and state.blocked_until > now then
        admission = BLOCKED
      elseif admission == REFUSED and op.allows_parole == 1 and op.cost <= state.parole then
        admission = PAROLE
      end
    end
    op.admission, responses[index + 1] = admission, response
    if op.verb == TAKE and admission >= REFUSED then
      any_refused, any_blocked = true, any_blocked or admission == BLOCKED
      if op.is_shadow == 0 then
        several_refused = several_refused or enforced_refused
        enforced_refused, enforced_blocked = true, enforced_blocked or admission == BLOCKED
      end
    end
  end
end

-- Charges. Ends a parole that admitted the call, or, if `may_lapse`, one that the room covers.
local function charge_and_end_parole(op, state, may_lapse)
  if op.queue then return charge_reserved(op, state) end
  if state.parole > 0 and (op.admission == PAROLE or may_lapse and has_room_for_parole[op.kind](op, state)) then
    state.parole = 0
  end
  charge[op.kind](op, state)
  state.changed = true
end

-- Empties the state, also for later operations on the same key, and publishes the reset.
local function reset(op, state)
  local key = state.key
  call('DEL', key)
  if op.queue_key then call('DEL', op.queue_key) end
  for field in pairs(state) do
    state[field] = nil
  end
  state.key, state.blocked_until, state.parole, state.strikes = key, 0, 0, 0
  load[op.kind](state)
  -- A user that may not publish may still reset.
  redis.pcall('PUBLISH', ARGV[2], string.sub(bytes, op.position, op.position + 23))
end

for index, op in ipairs(ops) do
  local state = op.state
  if op.verb == TAKE then
    local is_refused, is_blocked = enforced_refused, enforced_blocked
    if op.is_shadow == 1 then
      is_refused, is_blocked = any_refused, any_blocked
    end
    if op.admission < REFUSED then
      if not is_refused or (op.counts_refused == 1 and op.admission == ADMITTED) then charge_and_end_parole(op, state, true) end
    elseif op.queue then
      if not (is_blocked or several_refused or op.is_shadow == 1) then op.assigned_at = reserve(op, state) end
    elseif not is_blocked and op.has_penalty == 1 and (op.free_at or now) < NEVER then
      add_strike(op, state)
    end
    if state.changed then save[op.kind](op, state) end
    if op.queue then save_queue(op) end
  elseif op.verb == RESET then
    reset(op, state)
  elseif op.verb == DEBIT and op.kind <= QUOTA then
    evaluate[op.kind](op, state)
    charge_and_end_parole(op, state, not (state.strikes > 0 and state.blocked_until > now))
    save[op.kind](op, state)
  elseif op.verb == RESTORE_PENALTY then
    if op.has_penalty == 1 then
      evaluate[op.kind](op, state)
      restore_penalty(op, state)
      save[op.kind](op, state)
    end
  elseif op.verb > PEEK and apply[op.kind](op, state) then
    save[op.kind](op, state)
  end
  if op.queue then responses[index + 1] = responses[index + 1] .. pack('<d', op.assigned_at or 0) end
  if op.verb > PEEK then responses[index + 1] = op.response or pack('B', op.is_applied) end
end

return table.concat(responses)
