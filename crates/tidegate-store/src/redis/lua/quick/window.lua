
local value$, expires$ = call('GETRANGE', KEYS[$], 0, 2047)
local used$, newest$, free_from$, free_count$ = 0, 0, 0, 0
do
  local kept, oldest, head, size, coarse, first = 0, 0, 0, 0, 0, 1
  local is_changed = false
  if value$ ~= '' then
    local ends, parole, strikes
    kept, used$, newest$, oldest, head, size, coarse, ends, parole, strikes = unpack('<ddddddBddB', value$)
    first = 67 + head * 16
    if first + size * 16 > 2049 or strikes > 0 or parole > 0 or newest$ > now + lead$ then break end
    while size > 0 and now - oldest >= length$ do
      local _, count = unpack('<dd', value$, first)
      used$, size, first, is_changed = used$ - count, size - 1, first + 16, true
      if size > 0 then oldest = (unpack('<d', value$, first)) end
    end
    if used$ <= entries$ then coarse = 0 end
    if size == 0 then newest$ = 0 end
  end
  if cost$ == 0 then break end
  if never$ == 1 or used$ + cost$ > limit$ then
    if is_penalised$ or is_changed then break end
    is_refused = true
    local missing = never$ == 1 and 0 or used$ + cost$ - limit$
    for place = first, first + size * 16 - 16, 16 do
      if free_count$ >= missing then break end
      local at, count = unpack('<dd', value$, place)
      free_from$, free_count$ = at, free_count$ + count
    end
  end
  local at, count, last = now + ahead$, cost$, first + size * 16 - 16
  if at > NEVER then at = NEVER end
  if size > 0 then
    if newest$ > at then at = newest$ end
    if newest$ == at or (coarse == 1 and floor(newest$ / cell$) == floor(at / cell$)) then
      local _, before = unpack('<dd', value$, last)
      count, last, size = count + before, last - 16, size - 1
    elseif size >= most$ then
      break
    end
  end
  if size == 0 then oldest = at end
  if used$ + cost$ > COUNTED then break end
  local idle_at = at + length$
  if idle_at > NEVER then idle_at = NEVER end
  if kept < idle_at or kept > idle_at + idle_at - now then
    kept = idle_at + floor((idle_at - now) / 4)
    expires$ = ceil((kept - now) / 1000) + slack
  end
  value$ = pack('<ddddddBddB', kept, used$ + cost$, at, oldest, 0, size + 1, coarse, 0, 0, 0)
    .. string.sub(value$, first, last + 15)
    .. pack('<dd', at, count)
  if is_changed then were_changed = true end
end
