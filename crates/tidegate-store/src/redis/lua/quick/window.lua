
-- The header, and before it the newest slot. What is text already needn't be printed for the call.
local value$, expires$, offset$ = call('GETRANGE', KEYS[behind + $], '-90', '-1')
local used$, newest$, free_from$, free_count$ = 0, 0, 0, 0
do
  local kept, oldest, head, size, coarse, last = 0, 0, 0, 0, 0, 0
  local slots, first = '', 1
  local is_changed = false
  if value$ ~= '' then
    if #value$ < 90 then break end
    local room, ends, parole, strikes
    last, kept, used$, newest$, oldest, head, size, room, coarse, ends, parole, strikes =
      unpack('<xxxxxxxxddddddddBddB', value$)
    if strikes > 0 or parole > 0 or size == 0 or room ~= head + size or head > size + 64 then break end
    if newest$ > now + lead$ or now - newest$ >= length$ or cost$ == 0 then break end
    if now - oldest >= length$ then
      is_changed, slots = true, call('GETRANGE', KEYS[behind + $], head * 16, head * 16 + 1023)
      -- The newest is still there, so one is found that counts.
      while now - oldest >= length$ and first + 31 <= #slots do
        local _, count = unpack('<dd', slots, first)
        used$, size, head, first = used$ - count, size - 1, head + 1, first + 16
        oldest = (unpack('<d', slots, first))
      end
      if now - oldest >= length$ then break end
    end
    if used$ <= entries$ then coarse = 0 end
    offset$ = (head + size) * 16
  end
  if cost$ == 0 then break end
  if never$ == 1 or used$ + cost$ > limit$ then
    if is_penalised$ or is_changed then break end
    is_refused = true
    if never$ == 0 and size > 0 then
      local missing = used$ + cost$ - limit$
      slots = call('GETRANGE', KEYS[behind + $], head * 16, (head + (size < 64 and size or 64)) * 16 - 1)
      while free_count$ < missing and first < #slots do
        local at, count = unpack('<dd', slots, first)
        free_from$, free_count$, first = at, free_count$ + count, first + 16
      end
      if free_count$ < missing then break end
    end
  end
  local at, count = now + ahead$, cost$
  if at > NEVER then at = NEVER end
  if size > 0 then
    if newest$ > at then at = newest$ end
    if newest$ == at or (coarse == 1 and floor(newest$ / cell$) == floor(at / cell$)) then
      offset$, count, size = offset$ - 16, count + last, size - 1
    elseif size >= most$ then
      break
    end
  end
  if size == 0 then oldest = at end
  if used$ + cost$ > MAX_EXACT_INTEGER then break end
  local idle_at = at + length$
  if idle_at > NEVER then idle_at = NEVER end
  if kept < idle_at or kept > idle_at + idle_at - now then
    kept = idle_at + floor((idle_at - now) / 4)
    expires$ = ceil((kept - now) / 1000) + slack
  end
  value$ = pack(
    '<dddddddddBddB',
    at,
    count,
    kept,
    used$ + cost$,
    at,
    oldest,
    head,
    size + 1,
    head + size + 1,
    coarse,
    0,
    0,
    0
  )
  if is_changed then were_changed = true end
end
