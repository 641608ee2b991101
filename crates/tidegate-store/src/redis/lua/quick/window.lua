
-- The header, and before it the newest slot. Offsets given as text needn't be printed for the call.
local value$, expires$, write_offset$ = call('GETRANGE', KEYS[key_offset + $], '-90', '-1')
local total$, newest$, free_from$, free_count$ = 0, 0, 0, 0
do
  local kept_until, oldest, head, size, merged, newest_count = 0, 0, 0, 0, 0, 0
  local slots, position = '', 1
  local has_expired = false
  if value$ ~= '' then
    if #value$ < 90 then break end
    local allocated, blocked_until, parole, strikes
    newest_count, kept_until, total$, newest$, oldest, head, size, allocated, merged, blocked_until, parole, strikes =
      unpack('<xxxxxxxxddddddddBddB', value$)
    if strikes > 0 or parole > 0 or size == 0 or allocated ~= head + size or head > size + 64 then break end
    if newest$ > now + lead$ or now - newest$ >= window$ or cost$ == 0 then break end
    if now - oldest >= window$ then
      has_expired, slots = true, call('GETRANGE', KEYS[key_offset + $], head * 16, head * 16 + 1023)
      -- The newest slot is live, so this ends at a live one.
      while now - oldest >= window$ and position + 31 <= #slots do
        local _, count = unpack('<dd', slots, position)
        total$, size, head, position = total$ - count, size - 1, head + 1, position + 16
        oldest = (unpack('<d', slots, position))
      end
      if now - oldest >= window$ then break end
    end
    if total$ <= entries$ then merged = 0 end
    write_offset$ = (head + size) * 16
  end
  if cost$ == 0 then break end
  if exceeds_capacity$ == 1 or total$ + cost$ > limit$ then
    if has_penalty$ or has_expired then break end
    is_refused = true
    if exceeds_capacity$ == 0 and size > 0 then
      local missing = total$ + cost$ - limit$
      slots = call('GETRANGE', KEYS[key_offset + $], head * 16, (head + (size < 64 and size or 64)) * 16 - 1)
      while free_count$ < missing and position < #slots do
        local at, count = unpack('<dd', slots, position)
        free_from$, free_count$, position = at, free_count$ + count, position + 16
      end
      if free_count$ < missing then break end
    end
  end
  local at, count = now + batch_lead$, cost$
  if at > NEVER then at = NEVER end
  if size > 0 then
    if newest$ > at then at = newest$ end
    if newest$ == at or (merged == 1 and floor(newest$ / cell_length$) == floor(at / cell_length$)) then
      write_offset$, count, size = write_offset$ - 16, count + newest_count, size - 1
    elseif size >= max_slots$ then
      break
    end
  end
  if size == 0 then oldest = at end
  if total$ + cost$ > MAX_EXACT_INTEGER then break end
  local idle_at = at + window$
  if idle_at > NEVER then idle_at = NEVER end
  if kept_until < idle_at or kept_until > idle_at + idle_at - now then
    kept_until = idle_at + floor((idle_at - now) / 4)
    expires$ = ceil((kept_until - now) / 1000) + expiry_margin
  end
  value$ = pack('<dddddddddBddB', at, count, kept_until, total$ + cost$, at, oldest, head, size + 1, head + size + 1,
    merged, 0, 0, 0)
  if has_expired then any_expired = true end
end
