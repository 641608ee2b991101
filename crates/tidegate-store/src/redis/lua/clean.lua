-- In the place of `penalty.lua` where no limit of the batch has a penalty.
local settle_record, strike
local function remembered() return 0 end
