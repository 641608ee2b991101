-- In the place of `penalty.lua` if no limit of the batch has a penalty.
local refresh_record, add_strike
local function record_retained_until() return 0 end
